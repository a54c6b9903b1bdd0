"""Health check of a server: speaks a tiny utterance for real and examines its audio.

What a server says of itself is not enough: Triton stays ready when the process that runs the model has died or hangs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from token2wav_client.audio import AudioChunk
from token2wav_client.errors import ModelNotReadyError, ProtocolError, ResponseTimeoutError, ServerError
from token2wav_client.grpc_errors import is_full, is_shutting_down
from token2wav_client.tokens import TokenArray
from token2wav_client.voice import MEL_BINS, SPEAKER_SIZE, ClientVoice

TOKENS = (0, 1, 2)
_USUAL = (("prompt_mel", MEL_BINS), ("speaker_embedding", SPEAKER_SIZE))


def voice_of(metadata: Any | None) -> ClientVoice:
    """Make the voice of the tiny utterance for a model.

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
    """Health of a server: tells how long the tiny utterance took.

    Attributes:
        first_audio_s: seconds from the sending of its tokens to its first audio; None from a server that has no room
            for another utterance now, and said so.
        total_s: seconds to the end of the answer.
    """

    first_audio_s: float | None
    total_s: float


def tokens_for(voice: ClientVoice) -> TokenArray:
    """Make three tokens of as many codes as those of a voice's prompt."""
    return np.broadcast_to(np.array(TOKENS, np.int32), (*voice.prompt_tokens.shape[:0:-1], len(TOKENS))).T


class Examination:
    """Examination of the tiny utterance: times it, checks its audio and judges its failure, as a context around it.

    Args:
        timeout_s: seconds for all of it.

    Raises:
        ModelNotReadyError: on leaving, where the server said that it is shutting down.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._began = time.monotonic()
        self._first_audio_s: float | None = None

    def timed_out(self) -> ResponseTimeoutError:
        """Make the error of an utterance that was not done in time."""
        return ResponseTimeoutError(f"the server did not speak {len(TOKENS)} tokens within {self.timeout_s:.2g} s")

    def hear(self, chunk: AudioChunk) -> None:
        """Check a chunk of audio.

        Raises:
            ProtocolError: its samples are not finite.
        """
        if not np.isfinite(chunk.audio).all():
            raise ProtocolError("audio: the server sent NaN or infinite samples")
        if self._first_audio_s is None:
            self._first_audio_s = chunk.arrival_s

    def result(self) -> Health:
        """Return the health that the finished utterance showed."""
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
