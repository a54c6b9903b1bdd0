"""What a flow engine hands to whoever integrates the ODE: chunks with their conditions, and where their past lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Past:
    """The finished blocks that a chunk can see, in order.

    Attributes:
        blocks: their numbers within the utterance, counted from the start of the prompt.
        pages: where their keys and values are.
        prefix_blocks: how many of the utterance's first blocks stay visible whatever the window.
    """

    blocks: list[int]
    pages: list[int]
    prefix_blocks: int


@dataclass(frozen=True, eq=False)
class ChunkWork:
    """One chunk of one utterance.

    Attributes:
        noise, mu, cond: (bands, frames) start of the ODE and its conditions.
        speaker: (bands,).
        start: position of the first frame, counted from the start of the prompt.
        past: what it can see.
        new: pages for its own keys and values, a block each.
        contexts: (steps, 2 convolutions, branches, dim, CONTEXT_FRAMES) last inputs of the position convolutions
            before the chunk; replaced in place by those at its end.
    """

    noise: torch.Tensor
    mu: torch.Tensor
    cond: torch.Tensor
    speaker: torch.Tensor
    start: int
    past: Past
    new: list[int]
    contexts: torch.Tensor

    @property
    def frames(self) -> int:
        return self.noise.shape[1]


class ChunkSolver(Protocol):
    """Integrates the ODE for chunks whose past is in a `KeyValueStore`."""

    def solve(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        """Mel of every chunk, (bands, frames) float32, whatever else is in the batch; stores its keys and values."""
