"""Chunks on torch: keys and values are read from their pages in place where they follow one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from token2wav.engines.work import ChunkWork
from token2wav.flow.cache import ChunkMemory, KeyValueStore
from token2wav.flow.masks import BlockMask
from token2wav.flow.solver import EulerSolver


class TorchChunkSolver:
    """Runs chunks one by one.

    Args:
        solver: of the flow's estimator.
        store: memory of all pages.
        left_blocks: blocks of the past that stay visible beside the prompt's; negative for all.
    """

    def __init__(self, solver: EulerSolver, store: KeyValueStore, left_blocks: int) -> None:
        self._solver = solver
        self._store = store
        self._left_blocks = left_blocks

    def solve(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        """See `ChunkSolver`."""
        return [self._solve_one(work) for work in works]

    def _solve_one(self, work: ChunkWork) -> torch.Tensor:
        return self._solver.solve(
            work.noise[None],
            work.mu[None],
            work.speaker[None],
            work.cond[None],
            self._mask(work),
            ChunkMemory(self._store, work.past.pages, work.new, work.contexts),
            work.start,
        )[0]

    def _mask(self, work: ChunkWork) -> torch.Tensor | None:
        """(frames, keys) of a chunk over past blocks and its own; None where all is allowed."""
        size, device = self._store.layout.block_frames, work.noise.device
        if len(work.new) == 1 and work.frames == size and self._left_blocks < 0:
            return None
        first = work.start // size
        blocks = torch.tensor([*work.past.blocks, *range(first, first + len(work.new))], device=device)
        keys = (blocks[:, None] * size + torch.arange(size, device=device)).flatten()
        end = work.start + work.frames
        queries = torch.arange(work.start, end, device=device)
        allowed = BlockMask(size, self._left_blocks, work.past.prefix_blocks).allows(queries, keys)
        return allowed & (keys < end)  # a last block may be padded
