"""What both clients are before they connect: their arguments, checked, and the utterances that they open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from token2wav_client.audio import AudioFormat
from token2wav_client.connection import Endpoint, Tls
from token2wav_client.errors import InputError, ModelNotReadyError, UtteranceClosedError
from token2wav_client.exchange import Exchange
from token2wav_client.voice import ClientVoice, check_known_voice
from token2wav_client.wire import Opening

_MOST_STEPS = 2**31 - 1  # a server allows a few numbers, which it names


class BaseClient(ABC):
    """Arguments of `Client` and `AsyncClient`.

    Args:
        url: host:port of the server's gRPC endpoint.
        model: name of the model.
        connect_timeout_s: seconds in which the server must answer a question about its state.
        response_timeout_s: seconds of silence allowed while the server owes an answer. Waiting for a slow
            source of tokens is no silence of the server's.
        retries: how often to try again when no server answers, or it is lost, silent for too long or full: the first
            question of a client, and each utterance. Pauses grow from 0.5 to 4 s. An utterance is sent again from its
            start; audio that was delivered is not delivered twice.
        tls: how to encrypt; without it, everything travels in the clear.
        headers: to send with every call, for a proxy to look at.
        token: to send as `authorization: Bearer ...`; only with TLS, or to this machine itself.
        max_message_mib: MiB that a request or a response may have.

    Raises:
        InputError: naming the argument.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        model: str = "token2wav",
        connect_timeout_s: float = 5.0,
        response_timeout_s: float = 30.0,
        retries: int = 0,
        tls: Tls | None = None,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        max_message_mib: int = 64,
    ) -> None:
        self._endpoint = Endpoint(url, tls, headers or {}, token, max_message_mib)
        self._model = model
        self._connect_timeout_s = connect_timeout_s
        self._response_timeout_s = response_timeout_s
        if retries < 0:
            raise InputError(f"retries: {retries} is below 0")
        self._retries = retries
        self._model_seen_ready = False
        self._connect()

    @abstractmethod
    def _connect(self) -> None:
        """Make what a client holds from now on; called once, when all arguments are known to be right."""

    @property
    @abstractmethod
    def _is_closed(self) -> bool:
        """Whether `close` was called."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise UtteranceClosedError("the client is closed and opens no more utterances")

    def _exchange(
        self, voice: ClientVoice | str, audio_format: AudioFormat, keep_open: bool, steps: int | None, retries: int
    ) -> Exchange:
        if steps is not None and not 1 <= steps <= _MOST_STEPS:
            raise InputError(f"steps: {steps} is outside 1 to {_MOST_STEPS}")
        if isinstance(voice, str):
            check_known_voice(voice)
        return Exchange(self._model, Opening(voice, audio_format, keep_open, steps), repeatable=retries > 0)

    def _readiness_question(self) -> Any:
        return service_pb2.ModelReadyRequest(name=self._model)

    def _metadata_question(self) -> Any:
        return service_pb2.ModelMetadataRequest(name=self._model)

    def _note_readiness(self, answer: Any) -> None:
        if not answer.ready:
            raise ModelNotReadyError(
                f"model {self._model!r} at {self._endpoint.url} is missing, loading or failed to load"
            )
        self._model_seen_ready = True
