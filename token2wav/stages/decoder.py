"""Stage from tokens to audio: a codec decoder with input frames of codes or latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from token2wav.stages.pause import PauseVocoder
from token2wav.stages.recompute import RecomputeVocoder
from token2wav.stages.stage import (
    DEFAULT_OPTIONS,
    CacheUsage,
    FrameChunk,
    Stage,
    StreamOptions,
    TokenChunk,
)
from token2wav.stages.waveform import WaveformStage
from token2wav.stages.windows import WindowStage
from token2wav.voice import Voice


class TokenDecoder(Stage):
    """Decoder stage, which passes the tokens of each chunk to a waveform stage as frames.

    The codes or the latent of a token are a frame. The network looks up the embeddings of the
    codes.
    """

    def __init__(
        self, frames: WaveformStage | WindowStage | RecomputeVocoder | PauseVocoder
    ) -> None:
        self._frames = frames

    def open(self, voice: Voice | None = None, options: StreamOptions = DEFAULT_OPTIONS) -> int:
        return self._frames.open(voice, options)

    def advance(self, batch: Sequence[tuple[int, TokenChunk]]) -> list[torch.Tensor]:
        return self._frames.advance([(handle, _frame_chunk(chunk)) for handle, chunk in batch])

    def close(self, handle: int) -> None:
        self._frames.close(handle)

    def prompt_batches(
        self, voice: Voice | None = None, options: StreamOptions = DEFAULT_OPTIONS
    ) -> int:
        return 0

    def limit_chunks(self, most: int) -> None:
        self._frames.limit_chunks(most)

    def usage(self) -> CacheUsage:
        return self._frames.usage()

    def whole(self, tokens: NDArray[Any]) -> torch.Tensor:
        """Computes the audio (samples,) of all tokens (n, *token_shape) of an utterance."""
        return self._frames.whole(_as_frames(tokens))

    @property
    def open_streams(self) -> int:
        return self._frames.open_streams

    @property
    def withheld_samples(self) -> int:
        return self._frames.withheld_samples


def _frame_chunk(chunk: TokenChunk) -> FrameChunk:
    frames, count = _as_frames(chunk.tokens), chunk.stop - chunk.start
    return FrameChunk(frames[:, :count], chunk.last, frames[:, count:])


def _as_frames(tokens: NDArray[Any]) -> torch.Tensor:
    """Converts tokens (n,) or (n, channels) to frames (channels, n) of the same dtype."""
    if tokens.ndim == 1:
        tokens = tokens[:, None]
    return torch.from_numpy(tokens).T
