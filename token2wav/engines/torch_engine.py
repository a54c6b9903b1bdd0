"""Chunks on torch without padding: the frames of a batch stand in one long row.

What treats frames one by one, nearly all arithmetic, sees that row. Attention runs group by group: chunks of one length
at one place in their utterances, as streams have that began together, go through it in one call. The keys and values of
a chunk that is alone are read in place where their pages follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from token2wav.engines.work import ChunkWork
from token2wav.flow.cache import ChunkMemory, KeyValueStore, StepMemory
from token2wav.flow.dit import Attend, Convolution, DiT
from token2wav.flow.masks import BlockMask, attention_bias
from token2wav.flow.solver import OdeTables
from token2wav.groups import groups_of


class TorchChunkSolver:
    """See `ChunkSolver`. It has no state: threads may share it.

    Args:
        estimator: the DiT.
        tables: of the schedule.
        store: memory of all pages.
        left_blocks: blocks of the past that stay visible beside the prompt's; negative for all.
    """

    def __init__(self, estimator: DiT, tables: OdeTables, store: KeyValueStore, left_blocks: int) -> None:
        self._estimator = estimator
        self._tables = tables
        self._store = store
        self._left_blocks = left_blocks

    @torch.inference_mode()
    def solve(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        """See `ChunkSolver`."""
        if not works:
            return []
        groups = groups_of(works, lambda work: (work.frames, work.start, (*work.past.blocks,), work.past.prefix_blocks))
        mels = self._solve([[works[index] for index in members] for members in groups])
        by_index = dict(zip((index for members in groups for index in members), mels, strict=True))
        return [by_index[index] for index in range(len(works))]

    def _solve(self, groups: list[list[ChunkWork]]) -> list[torch.Tensor]:
        """Mels of chunks that were sorted into groups of one shape and one place in their utterances."""
        works = [work for group in groups for work in group]
        lengths = [work.frames for work in works]
        x, mu, cond = (
            torch.cat(parts, dim=1)[None]
            for parts in zip(*((work.noise, work.mu, work.cond) for work in works), strict=True)
        )
        speakers = torch.cat([work.speaker.expand(work.frames, -1) for work in works])[None]
        positions = [torch.arange(work.start, work.start + work.frames, device=x.device) for work in works]
        rope = self._estimator.rotary_embed(torch.cat(positions))
        memories = [
            ChunkMemory(
                self._store,
                [work.past.pages for work in group],
                [work.new for work in group],
                [work.contexts for work in group],
            )
            for group in groups
        ]
        frames = [sum(work.frames for work in group) for group in groups]
        biases = [self._bias(group[0]) for group in groups]
        mu, speakers, cond = self._tables.conditions(mu, speakers, cond)
        for step, modulation in enumerate(self._tables.modulation):
            memory = _RowMemory([each.step(step) for each in memories], frames, biases)
            velocity = self._estimator.velocity(
                self._tables.rows(x), mu, speakers, cond, modulation, rope, None, memory
            )
            x = self._tables.advance(step, x, velocity)
        for each in memories:
            each.finish()
        return list(x[0].split(lengths, dim=1))

    def _bias(self, work: ChunkWork) -> torch.Tensor | None:
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
        bias = attention_bias(allowed & (keys < end))  # a last block may be padded
        return bias.to(self._estimator.proj_out.weight.dtype)


class _RowMemory:
    """The estimator's `Memory` of groups of chunks that stand one behind the other in a row.

    Args:
        memories: of every group.
        lengths: frames of every group.
        biases: of every group's attention.
    """

    def __init__(
        self, memories: Sequence[StepMemory], lengths: list[int], biases: Sequence[torch.Tensor | None]
    ) -> None:
        self._memories = memories
        self._lengths = lengths
        self._biases = biases

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        """See `Memory`."""
        groups = [
            memory.extend_conv(index, chunks)
            for memory, chunks in zip(self._memories, x.split(self._lengths, dim=2), strict=True)
        ]
        if len({group.shape[2] for group in groups}) == 1:
            results = conv(_joined(groups, 0)).split([len(group) for group in groups])
        else:
            results = [conv(group) for group in groups]
        return _joined(
            [memory.behind_each_other(result) for memory, result in zip(self._memories, results, strict=True)], 2
        )

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Memory`; every group has a bias of its own."""
        groups = zip(*(value.split(self._lengths, dim=1) for value in (q, k, v)), strict=True)
        return _joined(
            [
                memory.attend(layer, attend, own_q, own_k, own_v, own_bias)
                for memory, (own_q, own_k, own_v), own_bias in zip(self._memories, groups, self._biases, strict=True)
            ],
            1,
        )


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """`torch.cat`, which copies even what is alone."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
