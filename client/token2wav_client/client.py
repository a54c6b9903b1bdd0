"""Client for threads: speaks utterances that one thread iterates while others push tokens."""

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
    """Utterance on a gRPC stream: takes tokens, yields chunks of audio. Made by `Client.open`; use
    it in a `with`.

    `push`, `finish`, `cancel` and `fail` may be called from any thread; one other thread may
    iterate. Iterating ends after the final chunk, or after `cancel`, and raises what went wrong
    otherwise. Chunks that wait to be taken are kept in memory.
    """

    _new_outbox = SimpleQueue

    def close(self) -> None:
        """End the utterance, gracefully if it is complete, else by cancelling, and wait for its
        threads.
        """
        if self.complete:
            self._receiver.join(CLOSE_GRACE_S)
        self.cancel()
        self._receiver.join()
        self._on_close(self)

    def __exit__(self, *error: object) -> None:
        self.close()

    def __next__(self) -> AudioChunk:
        with self._changed:
            while (chunk := self._next_chunk(StopIteration)) is None:
                patience_s = self._patience_s()
                if patience_s is None or patience_s > 0:
                    self._changed.wait(patience_s)
                else:
                    self._break_off()
            return chunk

    def _begin(self, retries: int) -> None:
        self._guard = self._changed = threading.Condition()  # notified on every change
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
        with self._changed:
            self._changed.wait_for(lambda: self._over, seconds)

    def _requests(self, outbox: SimpleQueue[Any]) -> Iterator[Any]:
        return iter(outbox.get, None)

    def _notify(self) -> None:
        self._changed.notify_all()

    def _hang_up(self) -> None:
        self._outbox.put(None)  # releases gRPC's thread that waits for requests
        if self._rpc is not None:
            self._rpc.cancel()


class Client(BaseClient[Utterance], AbstractContextManager["Client"]):
    """Client of a Triton server with the model `token2wav`: opens utterances. Thread-safe; use it
    in a `with`.

        with Client("localhost:8001") as client:
            for chunk in client.synthesize([tokens], voice):
                play(chunk.audio)

    Arguments are those of `BaseClient`.
    """

    _library, _kind = grpc, Utterance

    def health(self, *, timeout_s: float = 10.0, audio_format: AudioFormat = "float32") -> Health:
        """Check that the server works, by speaking three tokens with a voice that has no prompt.

        A server that has no room for another utterance works too. Nothing is tried again.

        Args:
            timeout_s: seconds for all of it.
            audio_format: of the samples to ask for.

        Raises:
            ServerUnavailable: nobody answers, or the server went away meanwhile.
            ModelNotReadyError: the server lacks the model, or is shutting down.
            AccessError: it lets this client in not at all.
            ResponseTimeoutError: it was not done in time.
            ProtocolError: the audio has not the samples that its tokens make, or is not finite.
            ServerError: the server failed to speak.
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
                examination.hear(chunk)
        return examination.result()

    def open(self, voice: ClientVoice | str, **options: Unpack[SpeechOptions]) -> Utterance:
        """Open an utterance on a gRPC stream of its own; nothing is sent before its first push.

        Args:
            voice: the voice to speak in, or the id or name of one that the server knows.
            options: keywords of `SpeechOptions`.

        Raises:
            VoiceError: a text that is neither an id nor a name.
            ServerUnavailable: nobody answers (asked once per client; later it shows on the
                utterance).
            ModelNotReadyError: the server lacks the model.
            AccessError: TLS failed, or the token or certificate was not accepted.
        """
        return self._open(Opening(voice, **options))

    def synthesize(
        self,
        token_batches: Iterable[npt.ArrayLike],
        voice: ClientVoice | str,
        **options: Unpack[SpeechOptions],
    ) -> Iterator[AudioChunk]:
        """Speak one utterance: send each batch as soon as it is there, yield each chunk as it
        arrives.

        The batches are taken in a thread. Leaving the loop early cancels the utterance; a batch
        that the iterable is still waiting for is dropped when it comes.

        Args:
            token_batches: each of shape (tokens,), integers; or a flat array or sequence of
                integers as a single batch.
            voice: the voice to speak in, or the id or name of one that the server knows.
            options: keywords of `SpeechOptions`; they are checked at the call, before anything is
                iterated.

        Raises:
            TokenError, InputError: wrong tokens, or none.
            ServerUnavailable, ServerError, ResponseTimeoutError, AccessError: from the server.
            Exception: whatever `token_batches` raises.
        """
        return self._speak(as_batches(token_batches), Opening(voice, **options))

    def _open(self, opening: Opening) -> Utterance:
        self._await_ready(self._retries)
        return self._new_utterance(opening, self._retries)

    def _speak(self, batches: Iterable[npt.ArrayLike], opening: Opening) -> Iterator[AudioChunk]:
        utterance = self._open(opening)
        # A daemon, because nothing can interrupt an iterable that waits for its source.
        sender = threading.Thread(target=_send_all, args=(utterance, batches), daemon=True)
        sender.start()
        try:
            yield from utterance
        finally:
            utterance.close()
            sender.join(SENDER_GRACE_S)

    def close(self) -> None:
        """Cancel what still runs and disconnect."""
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
    except BaseException as error:  # the thread that iterates must learn of it, whatever it is
        utterance.fail(error)


@atexit.register
def _close_forgotten() -> None:
    """Close the clients that a program left open while gRPC's threads still run: later, cancelling
    would hang.
    """
    for client in list(living_clients):
        if isinstance(client, Client):
            client.close()
