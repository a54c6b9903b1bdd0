"""Health check of a server: synthesizes a short utterance and checks its audio.

Triton's own readiness is not enough: Triton stays ready when the process that runs the model has
died or hangs.
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
    ENGINE,
    FULL,
    SHUTTING_DOWN,
    ClientError,
    ModelNotReadyError,
    ProtocolError,
    ResponseTimeoutError,
)
from token2wav_client.tokens import LATENTS, TokenArray
from token2wav_client.voice import MEL_BINS, SPEAKER_SIZE, ClientVoice

TOKENS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Health:
    """Result of a health check: the times that the short utterance took.

    Attributes:
        first_audio_s: seconds from sending the tokens to the first audio; None if the server
            responded that it has no room for another utterance.
        total_s: seconds to the end of the response.
    """

    first_audio_s: float | None
    total_s: float


class Examination:
    """Examination of a server by a short utterance: measures its times and checks its audio.

    The shapes of the utterance are those of the model. The voice has no prompt. So the server
    computes no prompt, and stores only a small entry for this voice.

    Args:
        metadata: Triton's ModelMetadataResponse, which contains the shapes of the inputs; None
            assumes the shapes of CosyVoice3.
        timeout_s: seconds for the whole examination.
    """

    def __init__(self, metadata: Any | None, timeout_s: float) -> None:
        tensors = [] if metadata is None else metadata.inputs
        shapes = {tensor.name: list(tensor.shape) for tensor in tensors}
        dtype, shape = (
            (np.float32, shapes[LATENTS])
            if LATENTS in shapes
            else (np.int32, shapes.get("tokens", [-1]))
        )
        # -1 for a model that accepts any number of codebooks
        codes = [max(1, count) for count in shape[1:]]
        self.tokens: TokenArray = np.broadcast_to(
            np.array(TOKENS, dtype), (*codes[::-1], len(TOKENS))
        ).T
        size = shapes.get("speaker_embedding", [SPEAKER_SIZE])[-1]
        self.voice: ClientVoice | None = None
        if size > 0:  # -1 for a model without voices
            self.voice = ClientVoice(
                prompt_tokens=np.zeros((0, *codes), np.int32),
                prompt_mel=np.zeros((0, shapes.get("prompt_mel", [MEL_BINS])[-1]), np.float32),
                speaker_embedding=np.ones(size, np.float32),
            )
        self.timeout_s = timeout_s
        self._began = time.monotonic()
        self._first_audio_s: float | None = None

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Context manager that converts errors of the utterance into results of the health check.

        If the server is shutting down, or its engine has ended or starts, the context raises
        ModelNotReadyError. If the server is full, the context raises nothing, because only an
        engine that works can answer so. After `timeout_s` every error becomes a
        ResponseTimeoutError, because a call that gRPC ends on its deadline can fail in many ways.
        """
        try:
            yield
        except ClientError as error:
            if time.monotonic() - self._began >= self.timeout_s:
                message = (
                    f"the server did not synthesize {len(TOKENS)} tokens within "
                    f"{self.timeout_s:.2g} s"
                )
                raise ResponseTimeoutError(message) from None
            if str(error).startswith((SHUTTING_DOWN, ENGINE)):
                raise ModelNotReadyError(str(error)) from None
            if not str(error).endswith(FULL):
                raise

    def check(self, chunk: AudioChunk) -> None:
        """Checks that the samples of a chunk are finite, and notes the arrival of the first chunk.
        Raises ProtocolError if the chunk has NaN or infinite samples.
        """
        if not np.isfinite(chunk.audio).all():
            raise ProtocolError("audio: the server sent NaN or infinite samples")
        if self._first_audio_s is None:
            self._first_audio_s = chunk.arrival_s

    def result(self) -> Health:
        """Returns the health of the server after the utterance has finished."""
        return Health(self._first_audio_s, time.monotonic() - self._began)
