"""Protocols of engines: what streams hand to them, and what they answer.

The protocol is at the level of chunks, not of layers, so that an engine may run all ODE steps as one captured graph.
An engine owns tensors (weights, histories); the handle that `open` returns is the only claim on what it keeps for one
stream, and `close` the only release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.voice import Voice


@dataclass(frozen=True, eq=False)
class FlowChunk:
    """The next piece of an utterance. Positions are tokens counted from the first prompt token.

    Attributes:
        tokens: (left + stop - start + right,) int32, or (..., codebooks): the chunk between `left` tokens that come
            before it and `right` that follow (the look-ahead; none if `last`).
        left: context tokens on the left.
        start: first token of the chunk; the previous chunk's stop, or the prefix length of the voice.
        stop: end of the chunk, a multiple of the attention block unless `last`.
        last: whether the utterance ends here.
    """

    tokens: NDArray[np.int32]
    left: int
    start: int
    stop: int
    last: bool


@dataclass(frozen=True, eq=False)
class MelChunk:
    """The next mel frames of an utterance, without its prompt.

    Attributes:
        mel: (bands, frames) float32.
        last: whether the utterance ends here.
    """

    mel: torch.Tensor
    last: bool


@dataclass(frozen=True)
class CacheUsage:
    """Use of an engine's cache.

    Attributes:
        capacity: pages in all.
        used: pages that are taken.
        shared: those of them that belong to voices' prompts.
        page_bytes: size of one.
        prompt_hits, prompt_misses: utterances whose voice's prompt was there, or had to be computed.
    """

    capacity: int = 0
    used: int = 0
    shared: int = 0
    page_bytes: int = 0
    prompt_hits: int = 0
    prompt_misses: int = 0


class FlowEngine(Protocol):
    """Tokens to mel."""

    def open(self, voice: Voice, steps: int = 0) -> int:
        """Starts an utterance and computes what depends on its voice alone; returns a handle.

        Args:
            voice: of the speaker.
            steps: of the ODE, one of the numbers that the engine was made for; 0 for the usual one.
        """

    def advance(self, batch: Sequence[tuple[int, FlowChunk]]) -> list[torch.Tensor]:
        """Mel of every chunk, (bands, 2 * (stop - start)) float32, whatever else is in the batch."""

    def close(self, handle: int) -> None:
        """Frees an utterance; a handle that is not open is ignored."""

    def usage(self) -> CacheUsage:
        """Of the cache now; all zero for an engine that has none."""

    def whole(self, tokens: NDArray[np.int32], voice: Voice, *, streaming: bool, steps: int = 0) -> torch.Tensor:
        """Mel of a whole utterance in one call, (bands, ratio * tokens): under the streaming mask or the full one."""

    @property
    def open_streams(self) -> int:
        """Utterances that hold memory."""


class VocoderEngine(Protocol):
    """Mel to audio."""

    def open(self) -> int:
        """Starts an utterance; returns a handle."""

    def advance(self, batch: Sequence[tuple[int, MelChunk]]) -> list[torch.Tensor]:
        """New audio of every utterance, (samples,) float32; some is held back until the last chunk."""

    def close(self, handle: int) -> None:
        """Frees an utterance; a handle that is not open is ignored."""

    def whole(self, mel: torch.Tensor) -> torch.Tensor:
        """Audio of a whole mel (bands, frames) in one call, (samples,)."""

    @property
    def open_streams(self) -> int:
        """Utterances that hold memory."""
