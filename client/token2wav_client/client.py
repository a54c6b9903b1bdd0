"""The face of the package: a connection to a server, from which utterances are opened."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakSet

import grpc
import numpy.typing as npt
from tenacity import Retrying, sleep_using_event
from tritonclient.grpc import service_pb2_grpc

from token2wav_client.audio import AudioChunk, AudioFormat
from token2wav_client.base import BaseClient
from token2wav_client.faults import explain
from token2wav_client.health import Health, speak_a_little, tokens_for, voice_of
from token2wav_client.retry import policy
from token2wav_client.stream import Utterance
from token2wav_client.tokens import as_batches
from token2wav_client.voice import ClientVoice

_SENDER_GRACE_S = 0.5


class Client(BaseClient):
    """A connection to a Triton server that runs the model `token2wav`. Thread-safe; use it in a `with`.

        with Client("localhost:8001") as client:
            for chunk in client.synthesize([tokens], voice):
                play(chunk.audio)

    Arguments are those of `BaseClient`.
    """

    def _connect(self) -> None:
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._utterances: set[Utterance] = set()
        _open_clients.add(self)
        self._channel = self._endpoint.channel()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def health(self, *, timeout_s: float = 10.0, audio_format: AudioFormat = "float32") -> Health:
        """Find out whether the server works, by speaking three tokens with a voice that has no prompt.

        A server that has no room for another utterance works too. Nothing is tried again.

        Args:
            timeout_s: seconds for all of it.
            audio_format: dtype of the samples to ask for.

        Raises:
            ServerUnavailable: nobody answers, or the server went away meanwhile.
            ModelNotReadyError: the server lacks the model, or is shutting down.
            AccessError: it lets this client in not at all.
            ResponseTimeoutError: it was not done in time.
            ProtocolError: the audio has not the samples that its tokens make, or is not finite.
            ServerError: the server failed to speak.
        """
        began = time.monotonic()
        voice = voice_of(self._metadata())
        utterance = self._open(voice, audio_format, keep_open=True, steps=None, retries=0)
        return speak_a_little(utterance, tokens_for(voice), timeout_s - (time.monotonic() - began))

    def open(
        self,
        voice: ClientVoice | str,
        *,
        audio_format: AudioFormat = "float32",
        keep_open: bool = True,
        steps: int | None = None,
    ) -> Utterance:
        """Open an utterance on a gRPC stream of its own; nothing is sent before its first push.

        Args:
            voice: the voice to speak in, or the id or name of one that the server knows.
            audio_format: dtype of the chunks' samples.
            keep_open: let the server notice at once when this client vanishes. Without it, a server learns
                that from its idle time-out.
            steps: of the ODE, one of those that the server allows; None for its usual number.

        Raises:
            VoiceError: a text that is neither an id nor a name.
            ServerUnavailable: nobody answers (asked once per client; later it shows on the utterance).
            ModelNotReadyError: the server lacks the model.
            AccessError: TLS failed, or the token or certificate was not accepted.
        """
        return self._open(voice, audio_format, keep_open, steps, self._retries)

    def synthesize(
        self,
        token_batches: Iterable[npt.ArrayLike],
        voice: ClientVoice | str,
        *,
        audio_format: AudioFormat = "float32",
        keep_open: bool = True,
        steps: int | None = None,
    ) -> Iterator[AudioChunk]:
        """Speak one utterance: send each batch as soon as it is there, yield each chunk as it arrives.

        The batches are taken in a thread. Leaving the loop early cancels the utterance; a batch that the
        iterable is still waiting for is dropped when it comes.

        Args:
            token_batches: each of shape (tokens,), integers; or a flat array or sequence of integers as a single batch.
            voice: the voice to speak in, or the id or name of one that the server knows.
            audio_format: dtype of the chunks' samples.
            keep_open: as in `open`.
            steps: as in `open`.

        Raises:
            TokenError, InputError: wrong tokens, or none.
            ServerUnavailable, ServerError, ResponseTimeoutError, AccessError: from the server.
            Exception: whatever `token_batches` raises.
        """
        batches = as_batches(token_batches)
        utterance = self.open(voice, audio_format=audio_format, keep_open=keep_open, steps=steps)
        # A daemon, because nothing can interrupt an iterable that waits for its source.
        sender = threading.Thread(target=_send_all, args=(utterance, batches), daemon=True)
        sender.start()
        try:
            yield from utterance
        finally:
            utterance.close()
            sender.join(_SENDER_GRACE_S)

    def close(self) -> None:
        """Cancel what still runs and disconnect."""
        self._closed.set()
        with self._lock:
            running = list(self._utterances)
        for utterance in running:
            utterance.close()
        self._channel.close()
        _open_clients.discard(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _forget(self, utterance: Utterance) -> None:
        with self._lock:
            self._utterances.discard(utterance)

    def _open(
        self, voice: ClientVoice | str, audio_format: AudioFormat, keep_open: bool, steps: int | None, retries: int
    ) -> Utterance:
        self._check_open()
        exchange = self._exchange(voice, audio_format, keep_open, steps, retries)
        if not self._model_seen_ready:
            Retrying(sleep=sleep_using_event(self._closed), **policy(retries))(self._ask_readiness)
        utterance = Utterance(
            partial(self._stub.ModelStreamInfer, metadata=self._endpoint.metadata),
            exchange,
            url=self._endpoint.url,
            response_timeout_s=self._response_timeout_s,
            retries=retries,
            on_close=self._forget,
        )
        with self._lock:
            self._utterances.add(utterance)
        return utterance

    @property
    def _is_closed(self) -> bool:
        return self._closed.is_set()

    def _metadata(self) -> Any | None:
        """What the server says of the model's inputs; None if it does not say it."""
        self._check_open()
        if not self._model_seen_ready:
            self._ask_readiness()
        try:
            return self._stub.ModelMetadata(
                self._metadata_question(), timeout=self._connect_timeout_s, metadata=self._endpoint.metadata
            )
        except grpc.RpcError:
            return None

    def _ask_readiness(self) -> None:
        self._check_open()
        try:
            answer = self._stub.ModelReady(
                self._readiness_question(), timeout=self._connect_timeout_s, metadata=self._endpoint.metadata
            )
        except grpc.RpcError as error:
            raise explain(error, self._endpoint.url) from None
        self._note_readiness(answer)


def _send_all(utterance: Utterance, token_batches: Iterable[npt.ArrayLike]) -> None:
    try:
        for batch in token_batches:
            utterance.push(batch)
        utterance.finish()
    except BaseException as error:  # the thread that iterates must learn of it, whatever it is
        utterance.fail(error)


_open_clients: WeakSet[Client] = WeakSet()


@atexit.register
def _close_forgotten() -> None:
    """Close what a program left open, while gRPC's threads still run: once they are gone, cancelling would hang."""
    for client in list(_open_clients):
        client.close()
