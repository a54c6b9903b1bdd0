"""Health as a caller would feel it: a tiny utterance, spoken for real and checked.

What a server says of itself is not enough: Triton stays ready when the process that runs the model has died or hangs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from token2wav_client.aio_stream import AsyncUtterance
from token2wav_client.audio import AudioChunk
from token2wav_client.errors import ModelNotReadyError, ProtocolError, ResponseTimeoutError, ServerError
from token2wav_client.grpc_errors import is_full, is_shutting_down
from token2wav_client.stream import Utterance
from token2wav_client.tokens import TokenArray
from token2wav_client.voice import MEL_BINS, SPEAKER_SIZE, ClientVoice

TOKENS = (0, 1, 2)
_USUAL = (("prompt_mel", MEL_BINS), ("speaker_embedding", SPEAKER_SIZE))


def voice_of(metadata: Any | None) -> ClientVoice:
    """The voice of a model's tiny utterance.

    It is a speaker without a recording: no prompt has to be computed, and a server that keeps voices keeps one small
    one.

    Args:
        metadata: Triton's ModelMetadataResponse, which says the shapes of inputs; without it, those of CosyVoice3.
    """
    shapes = {} if metadata is None else {each.name: list(each.shape) for each in metadata.inputs}
    bands, size = (shapes.get(name, [usual])[-1] for name, usual in _USUAL)
    return ClientVoice(
        prompt_tokens=np.zeros((0, *shapes.get("tokens", [-1])[1:]), np.int32),
        prompt_mel=np.zeros((0, bands), np.float32),
        speaker_embedding=np.ones(size, np.float32),
    )


@dataclass(frozen=True, slots=True)
class Health:
    """What a tiny utterance showed.

    Attributes:
        first_audio_s: seconds from the sending of its tokens to its first audio; None from a server that has no room
            for another utterance now, and said so.
        total_s: seconds to the end of the answer.
    """

    first_audio_s: float | None
    total_s: float


def tokens_for(voice: ClientVoice) -> TokenArray:
    """Three tokens of as many codes as those of a voice's prompt."""
    return np.broadcast_to(np.array(TOKENS, np.int32), (*voice.prompt_tokens.shape[:0:-1], len(TOKENS))).T


def speak_a_little(utterance: Utterance, tokens: TokenArray, timeout_s: float) -> Health:
    """Speak three tokens in an utterance that was just opened, and check what comes back.

    Args:
        utterance: in the voice of `voice_of`; it is closed.
        tokens: of `tokens_for`.
        timeout_s: seconds for all of it.

    Raises:
        ModelNotReadyError: the server is shutting down.
        ResponseTimeoutError: it was not done in time.
        ProtocolError: the audio has not the samples that its tokens make, or is not finite.
        ClientError: any other failure of an utterance.
    """
    examination = _Examination()
    deadline = threading.Timer(timeout_s, utterance.fail, [_late(timeout_s)])
    deadline.daemon = True
    deadline.start()
    try:
        with examination, utterance:
            utterance.finish(tokens)
            for chunk in utterance:
                examination.hear(chunk)
    finally:
        deadline.cancel()
    return examination.result()


async def speak_a_little_async(utterance: AsyncUtterance, tokens: TokenArray, timeout_s: float) -> Health:
    """As `speak_a_little`, in an event loop."""
    examination = _Examination()
    deadline = asyncio.get_running_loop().call_later(timeout_s, utterance.fail, _late(timeout_s))
    try:
        with examination:
            async with utterance:
                utterance.finish(tokens)
                async for chunk in utterance:
                    examination.hear(chunk)
    finally:
        deadline.cancel()
    return examination.result()


class _Examination:
    """Times the utterance, judges its audio, and its failure where it is left with one."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first_audio_s: float | None = None

    def hear(self, chunk: AudioChunk) -> None:
        if not np.isfinite(chunk.audio).all():
            raise ProtocolError("audio: the server sent NaN or infinite samples")
        if self._first_audio_s is None:
            self._first_audio_s = chunk.arrival_s

    def result(self) -> Health:
        return Health(self._first_audio_s, time.monotonic() - self._began)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, ServerError):
            return False
        # Both are answers of a model process that works.
        if is_shutting_down(error):
            raise ModelNotReadyError(str(error)) from None
        return is_full(error)


def _late(timeout_s: float) -> ResponseTimeoutError:
    return ResponseTimeoutError(f"the server did not speak {len(TOKENS)} tokens within {timeout_s:.2g} s")
