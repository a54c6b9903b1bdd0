"""Chunks on torch without padding: the frames of a batch stand in one long row.

What treats frames one by one, nearly all arithmetic, sees that row. Convolutions get each chunk's context between the
chunks; attention runs chunk by chunk, on keys and values in their pages, in place where those follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from token2wav.engines.work import ChunkWork
from token2wav.flow.cache import ChunkMemory, KeyValueStore, StepMemory
from token2wav.flow.dit import CONTEXT_FRAMES, Attend, Convolution, DiT
from token2wav.flow.masks import BlockMask, attention_bias
from token2wav.flow.solver import OdeTables


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
        lengths = [work.frames for work in works]
        x, mu, cond = (
            torch.cat(parts, dim=1)[None]
            for parts in zip(*((work.noise, work.mu, work.cond) for work in works), strict=True)
        )
        speakers = torch.cat([work.speaker.expand(work.frames, -1) for work in works])[None]
        positions = [torch.arange(work.start, work.start + work.frames, device=x.device) for work in works]
        rope = self._estimator.rotary_embed(torch.cat(positions))
        memories = [ChunkMemory(self._store, work.past.pages, work.new, work.contexts) for work in works]
        biases = [self._bias(work) for work in works]
        mu, speakers, cond = self._tables.conditions(mu, speakers, cond)
        for step, modulation in enumerate(self._tables.modulation):
            memory = _RowMemory([each.step(step) for each in memories], lengths, biases)
            velocity = self._estimator.velocity(
                self._tables.rows(x), mu, speakers, cond, modulation, rope, None, memory
            )
            x = self._tables.advance(step, x, velocity)
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
    """The estimator's `Memory` of chunks that stand one behind the other in a row.

    Args:
        memories: of every chunk.
        lengths: frames of every chunk.
        biases: of every chunk's attention.
    """

    def __init__(
        self, memories: Sequence[StepMemory], lengths: list[int], biases: Sequence[torch.Tensor | None]
    ) -> None:
        self._memories = memories
        self._lengths = lengths
        self._biases = biases

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        """See `Memory`."""
        if len(self._memories) == 1:  # spares four copies
            return conv(self._memories[0].extend_conv(index, x))
        chunks = x.split(self._lengths, dim=2)
        row = torch.cat(
            [memory.extend_conv(index, chunk) for memory, chunk in zip(self._memories, chunks, strict=True)], 2
        )
        # What comes out where a context follows a chunk mixes the two and is dropped.
        pieces = conv(row).split(
            [length + CONTEXT_FRAMES for length in self._lengths[:-1]] + [self._lengths[-1]], dim=2
        )
        return torch.cat([piece[:, :, :length] for piece, length in zip(pieces, self._lengths, strict=True)], dim=2)

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Memory`; every chunk has a bias of its own."""
        if len(self._memories) == 1:
            return self._memories[0].attend(layer, attend, q, k, v, self._biases[0])
        chunks = zip(*(value.split(self._lengths, dim=1) for value in (q, k, v)), strict=True)
        return torch.cat(
            [
                memory.attend(layer, attend, own_q, own_k, own_v, own_bias)
                for memory, (own_q, own_k, own_v), own_bias in zip(self._memories, chunks, self._biases, strict=True)
            ],
            dim=1,
        )
