"""Health check of a server: speaks a tiny utterance for real and examines its audio.

What a server says of itself is not enough: Triton stays ready when the process that runs the model
has died or hangs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from token2wav_client.audio import AudioChunk
from token2wav_client.errors import (
    FULL,
    SHUTTING_DOWN,
    ClientError,
    ModelNotReadyError,
    ProtocolError,
    ResponseTimeoutError,
)
from token2wav_client.tokens import TokenArray
from token2wav_client.voice import MEL_BINS, SPEAKER_SIZE, ClientVoice

TOKENS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Health:
    """Health of a server: tells how long the tiny utterance took.

    Attributes:
        first_audio_s: seconds from the sending of its tokens to its first audio; None from a server
            that has no room for another utterance now, and said so.
        total_s: seconds to the end of the answer.
    """

    first_audio_s: float | None
    total_s: float


class Examination:
    """Examination by a tiny utterance that fits the model: times it, checks its audio and judges
    its failure.

    It has a speaker without a recording: no prompt has to be computed, and a server that keeps
    voices keeps one small one.

    Args:
        metadata: Triton's ModelMetadataResponse, which says the shapes of inputs; without it, those
            of CosyVoice3.
        timeout_s: seconds for all of it.
    """

    def __init__(self, metadata: Any | None, timeout_s: float) -> None:
        shapes = (
            {} if metadata is None else {each.name: list(each.shape) for each in metadata.inputs}
        )
        codes = shapes.get("tokens", [-1])[1:]
        self.tokens: TokenArray = np.broadcast_to(
            np.array(TOKENS, np.int32), (*codes[::-1], len(TOKENS))
        ).T
        self.voice = ClientVoice(
            prompt_tokens=np.zeros((0, *codes), np.int32),
            prompt_mel=np.zeros((0, shapes.get("prompt_mel", [MEL_BINS])[-1]), np.float32),
            speaker_embedding=np.ones(
                shapes.get("speaker_embedding", [SPEAKER_SIZE])[-1], np.float32
            ),
        )
        self.timeout_s = timeout_s
        self._began = time.monotonic()
        self._first_audio_s: float | None = None

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Raise for a server that shuts down as for one whose model is not ready; let it be if it
        is full.

        Both are answers of a model process that works. A call that gRPC ends when its time is over
        fails in many ways.
        """
        try:
            yield
        except ClientError as error:
            if time.monotonic() - self._began >= self.timeout_s:
                late = (
                    f"the server did not speak {len(TOKENS)} tokens within {self.timeout_s:.2g} s"
                )
                raise ResponseTimeoutError(late) from None
            if str(error).startswith(SHUTTING_DOWN):
                raise ModelNotReadyError(str(error)) from None
            if not str(error).endswith(FULL):
                raise

    def hear(self, chunk: AudioChunk) -> None:
        """Check that the samples of a chunk are finite; raises a ProtocolError else."""
        if not np.isfinite(chunk.audio).all():
            raise ProtocolError("audio: the server sent NaN or infinite samples")
        if self._first_audio_s is None:
            self._first_audio_s = chunk.arrival_s

    def result(self) -> Health:
        """Return the health that the finished utterance showed."""
        return Health(self._first_audio_s, time.monotonic() - self._began)
