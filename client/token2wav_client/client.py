"""The face of the package: a connection to a server, from which utterances are opened."""

from __future__ import annotations

import atexit
import re
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any
from weakref import WeakSet

import grpc
import numpy.typing as npt
from tritonclient.grpc import service_pb2, service_pb2_grpc

from token2wav_client.audio import AudioChunk, AudioFormat
from token2wav_client.errors import InputError, ModelNotReadyError, VoiceError
from token2wav_client.faults import explain
from token2wav_client.health import VOICE, Health, speak_a_little
from token2wav_client.stream import Utterance
from token2wav_client.voice import ClientVoice
from token2wav_client.wire import Opening

_CHANNEL_OPTIONS = [
    # Long prompts and long chunks pass gRPC's default of 4 MB.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Every client has connections of its own: no waiting behind another one's back-off, and a load balancer
    # can spread several clients of one process.
    ("grpc.use_local_subchannel_pool", 1),
]

_SENDER_GRACE_S = 0.5
_VOICE_ID = re.compile("[0-9a-f]{64}")


class Client:
    """A connection to a Triton server that runs the model `token2wav`. Thread-safe; use it in a `with`.

        with Client("localhost:8001") as client:
            for chunk in client.synthesize([tokens], voice):
                play(chunk.audio)

    Args:
        url: host:port of the server's gRPC endpoint.
        model: name of the model.
        connect_timeout_s: seconds in which the server must answer a question about its state.
        response_timeout_s: seconds of silence allowed while the server owes an answer. Waiting for a slow
            source of tokens is no silence of the server's.

    Raises:
        InputError: `url` is not host:port.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        model: str = "token2wav",
        connect_timeout_s: float = 5.0,
        response_timeout_s: float = 30.0,
    ) -> None:
        host, _, port = url.rpartition(":")
        if not host or not port.isdigit() or "/" in url:
            raise InputError(f"url: {url!r} is not host:port, as in localhost:8001")
        self._url = url
        self._model = model
        self._connect_timeout_s = connect_timeout_s
        self._response_timeout_s = response_timeout_s
        self._model_seen_ready = False
        self._lock = threading.Lock()
        self._utterances: set[Utterance] = set()
        _open_clients.add(self)
        self._channel = grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def health(self, *, timeout_s: float = 10.0, audio_format: AudioFormat = "float32") -> Health:
        """Find out whether the server works, by speaking three tokens with a voice that has no prompt.

        A server that has no room for another utterance works too.

        Args:
            timeout_s: seconds for all of it.
            audio_format: dtype of the samples to ask for.

        Raises:
            ServerUnavailable: nobody answers, or the server went away meanwhile.
            ModelNotReadyError: the server lacks the model, or is shutting down.
            ResponseTimeoutError: it was not done in time.
            ProtocolError: the audio has not 960 samples per token, or is not finite.
            ServerError: the server failed to speak.
        """
        began = time.monotonic()
        utterance = self.open(VOICE, audio_format=audio_format)
        return speak_a_little(utterance, timeout_s - (time.monotonic() - began))

    def open(
        self, voice: ClientVoice | str, *, audio_format: AudioFormat = "float32", keep_open: bool = True
    ) -> Utterance:
        """Open an utterance on a gRPC stream of its own; nothing is sent before its first push.

        Args:
            voice: the voice to speak in, or the id of one that the server was sent before.
            audio_format: dtype of the chunks' samples.
            keep_open: let the server notice at once when this client vanishes. Without it, a server learns
                that from its idle time-out.

        Raises:
            VoiceError: an id that is none.
            ServerUnavailable: nobody answers (asked once per client; later it shows on the utterance).
            ModelNotReadyError: the server lacks the model.
        """
        if isinstance(voice, str) and not _VOICE_ID.fullmatch(voice):
            raise VoiceError(f"voice id: {voice!r} is not 64 hexadecimal digits")
        if not self._model_seen_ready:
            if not self._model_ready():
                raise ModelNotReadyError(f"model {self._model!r} at {self._url} is missing, loading or failed to load")
            self._model_seen_ready = True
        utterance = Utterance(
            self._stub.ModelStreamInfer,
            url=self._url,
            model=self._model,
            opening=Opening(voice, audio_format, keep_open),
            response_timeout_s=self._response_timeout_s,
            on_close=self._forget,
        )
        with self._lock:
            self._utterances.add(utterance)
        return utterance

    def synthesize(
        self,
        token_batches: Iterable[npt.ArrayLike],
        voice: ClientVoice | str,
        *,
        audio_format: AudioFormat = "float32",
        keep_open: bool = True,
    ) -> Iterator[AudioChunk]:
        """Speak one utterance: send each batch as soon as it is there, yield each chunk as it arrives.

        The batches are taken in a thread. Leaving the loop early cancels the utterance; a batch that the
        iterable is still waiting for is dropped when it comes.

        Args:
            token_batches: each of shape (tokens,), integers.
            voice: the voice to speak in, or the id of one that the server was sent before.
            audio_format: dtype of the chunks' samples.
            keep_open: as in `open`.

        Raises:
            TokenError, InputError: wrong tokens, or none.
            ServerUnavailable, ServerError, ResponseTimeoutError: from the server.
            Exception: whatever `token_batches` raises.
        """
        utterance = self.open(voice, audio_format=audio_format, keep_open=keep_open)
        # A daemon, because nothing can interrupt an iterable that waits for its source.
        sender = threading.Thread(target=_send_all, args=(utterance, token_batches), daemon=True)
        sender.start()
        try:
            yield from utterance
        finally:
            utterance.close()
            sender.join(_SENDER_GRACE_S)

    def close(self) -> None:
        """Cancel what still runs and disconnect."""
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

    def _model_ready(self) -> bool:
        return bool(self._ask(self._stub.ModelReady, service_pb2.ModelReadyRequest(name=self._model)).ready)

    def _ask(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._connect_timeout_s)
        except grpc.RpcError as error:
            raise explain(error, self._url) from None


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
