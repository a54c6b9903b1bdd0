"""Client for threads: one thread iterates over an utterance while other threads push tokens."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
import numpy.typing as npt
from tenacity import Retrying, sleep_using_event

from token2wav_client.audio import AudioChunk, AudioFormat
from token2wav_client.base import SENDER_GRACE_S, BaseClient, living_clients, retry_policy
from token2wav_client.health import Examination, Health
from token2wav_client.tokens import as_batches
from token2wav_client.utterance import CLOSE_GRACE_S, BaseUtterance
from token2wav_client.voice import ClientVoice
from token2wav_client.wire import Opening, SpeechOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Utterance(BaseUtterance, Iterator[AudioChunk], AbstractContextManager["Utterance"]):
    """Utterance on a gRPC stream: takes tokens and yields chunks of audio.

    `Client.open` creates an utterance. Use it in a `with` statement.

    `push`, `finish`, `cancel` and `fail` may be called from any thread. Only one thread at a time
    may iterate. Iteration ends after the final chunk, or after `cancel`. If the utterance fails,
    iteration raises the error. Chunks are kept in memory until the iteration takes them.
    """

    _new_outbox = SimpleQueue

    def close(self) -> None:
        """Ends the utterance and waits for its threads.

        An utterance whose final chunk has arrived ends gracefully. Any other utterance is
        cancelled.
        """
        if self.complete:
            self._receiver.join(CLOSE_GRACE_S)
        self.cancel()
        self._receiver.join()
        self._on_close(self)

    def __exit__(self, *error: object) -> None:
        self.close()

    def __next__(self) -> AudioChunk:
        with self._guard:
            while (chunk := self._next_chunk(StopIteration)) is None:
                patience_s = self._patience_s()
                if patience_s is None or patience_s > 0:
                    self._changed.wait(patience_s)
                else:
                    self._break_off()
            return chunk

    def _begin(self, retries: int) -> None:
        # Callers enter this lock, not the Condition. `Condition.__enter__` is Python code, and
        # Ctrl-C can interrupt it after it has taken the lock.
        self._guard = lock = threading.RLock()
        self._changed = threading.Condition(lock)  # notified of every change of the state
        self._retrying = Retrying(sleep=self._pause, **retry_policy(retries))
        self._receiver = threading.Thread(
            target=self._receive, name=f"utterance-{self.id}", daemon=True
        )
        self._receiver.start()

    def _receive(self) -> None:
        with self._final_errors():
            self._retrying(self._attempt)

    def _attempt(self) -> None:
        with self._attempting() as rpc:
            for message in rpc:
                self._accept(message)

    def _pause(self, seconds: float) -> None:
        with self._guard:
            self._changed.wait_for(lambda: self._over, seconds)

    def _requests(self, outbox: SimpleQueue[bool]) -> Iterator[Any]:
        while outbox.get():
            if (request := self._next_request(outbox)) is not None:
                yield request

    def _notify(self) -> None:
        self._changed.notify_all()

    def _hang_up(self) -> None:
        self._outbox.put(False)  # releases the thread of gRPC that waits for requests
        if self._rpc is not None:
            self._rpc.cancel()


class Client(BaseClient[Utterance], AbstractContextManager["Client"]):
    """Client of a Triton server with the model `token2wav`: opens utterances.

        with Client("localhost:8001") as client:
            for chunk in client.synthesize([tokens], voice):
                play(chunk.audio)

    The client is thread-safe. Use it in a `with` statement. The constructor takes the arguments of
    `BaseClient`.
    """

    _library, _kind = grpc, Utterance

    def health(self, *, timeout_s: float = 10.0, audio_format: AudioFormat = "float32") -> Health:
        """Checks that the server works by synthesizing three tokens with a voice without a prompt.

        A server that is too full for another utterance counts as healthy. The check is never
        retried.

        Raises:
            ServerUnavailable: no server answers, or the connection was lost during the check.
            ModelNotReadyError: the server lacks the model, or it is shutting down.
            AccessError: the server rejects this client.
            ResponseTimeoutError: the check was not finished in time.
            ProtocolError: the number of samples does not match the tokens, or samples are not
                finite.
            ServerError: the server failed to synthesize the tokens.
        """
        began, metadata = time.monotonic(), None
        self._await_ready(retries=0)
        with suppress(grpc.RpcError):
            metadata = self._ask("ModelMetadata")
        examination = Examination(metadata, timeout_s - (time.monotonic() - began))
        opening = Opening(examination.voice, audio_format)
        with (
            examination.judging(),
            self._new_utterance(opening, 0, examination.timeout_s) as utterance,
        ):
            utterance.finish(examination.tokens)
            for chunk in utterance:
                examination.check(chunk)
        return examination.result()

    def open(
        self, voice: ClientVoice | str | None = None, **options: Unpack[SpeechOptions]
    ) -> Utterance:
        """Opens an utterance on a gRPC stream of its own. The first push sends the first request.

        Args:
            voice: voice of the utterance, or the id or name of a voice that the server has;
                None for a model without voices, such as a codec decoder.
            options: keywords of `SpeechOptions`.

        Raises:
            VoiceError: the voice is a text that is neither an id nor a name.
            ServerUnavailable: no server answers. Only the first call of a client checks this. If
                the server fails later, the utterance raises the error.
            ModelNotReadyError: the server lacks the model.
            AccessError: TLS failed, or the server rejected the token or certificate.
        """
        return self._open(Opening(voice, **options))

    def synthesize(
        self,
        token_batches: Iterable[npt.ArrayLike],
        voice: ClientVoice | str | None = None,
        **options: Unpack[SpeechOptions],
    ) -> Iterator[AudioChunk]:
        """Synthesizes one utterance: sends batches when they are ready, yields chunks on arrival.

        A separate thread iterates over the batches. If you leave the loop early, the utterance is
        cancelled. A batch that the iterable yields after that is not sent.

        Args:
            token_batches: batches of integers, each of shape (tokens,). A flat array or sequence of
                integers is a single batch.
            voice: voice of the utterance, or the id or name of a voice that the server has;
                None for a model without voices, such as a codec decoder.
            options: keywords of `SpeechOptions`. They are checked at the call, before the iteration
                starts.

        Raises:
            TokenError, InputError: tokens are invalid, or there are none.
            ServerUnavailable, ServerError, ResponseTimeoutError, AccessError: the server or the
                connection to it failed.
            Exception: any error that `token_batches` raises.
        """
        return self._speak(as_batches(token_batches), Opening(voice, **options))

    def _open(self, opening: Opening) -> Utterance:
        self._await_ready(self._retries)
        return self._new_utterance(opening, self._retries)

    def _speak(self, batches: Iterable[npt.ArrayLike], opening: Opening) -> Iterator[AudioChunk]:
        utterance = self._open(opening)
        # The thread is a daemon, because an iterable that waits for its source cannot be
        # interrupted.
        sender = threading.Thread(target=_send_all, args=(utterance, batches), daemon=True)
        sender.start()
        try:
            yield from utterance
        finally:
            utterance.close()
            sender.join(SENDER_GRACE_S)

    def close(self) -> None:
        """Cancels all open utterances and disconnects."""
        self._closed.set()
        for utterance in self._utterances.copy():
            utterance.close()
        self._channel.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _await_ready(self, retries: int) -> None:
        if not self._model_seen_ready:
            Retrying(sleep=sleep_using_event(self._closed), **retry_policy(retries))(
                self._check_ready
            )

    def _check_ready(self) -> None:
        with self._grpc_errors():
            self._note_ready(self._ask("ModelReady"))


def _send_all(utterance: Utterance, token_batches: Iterable[npt.ArrayLike]) -> None:
    try:
        for batch in token_batches:
            utterance.push(batch)
        utterance.finish()
    except BaseException as error:  # any error must be raised in the thread that iterates
        utterance.fail(error)


@atexit.register
def _close_forgotten() -> None:
    """Closes the clients that a program left open, while the threads of gRPC still run.

    Cancelling an utterance later, during the exit of the interpreter, would hang.
    """
    for client in list(living_clients):
        if isinstance(client, Client):
            client.close()
