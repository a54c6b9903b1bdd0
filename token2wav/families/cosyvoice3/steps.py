"""Estimator on torch, eagerly: attention goes block by block over keys and values where they lie.

What treats frames one by one, nearly all arithmetic, sees all blocks at once. Attention of several blocks in one call
was tried: copying what each sees into one tensor costs more than the calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution import block_table
from token2wav.execution.batch import Batch, Block
from token2wav.execution.step import StepFunction, Velocity
from token2wav.networks.dit import CONTEXT_FRAMES, Attend, Convolution, DiT
from token2wav.networks.ode import OdeTables


class DiTStep(StepFunction):
    """Step function of a DiT, in any way.

    Args:
        estimator: on the device of the cache; its weights are used, not copied.
        tables: of the ODE's schedule.
        cache: of keys and values.
    """

    def __init__(self, estimator: DiT, tables: OdeTables, cache: PagedKVCache) -> None:
        super().__init__(tables, cache)
        self.estimator = estimator

    def of_conditions(self, batch: Batch) -> torch.Tensor:
        """Share of the conditions in the input projection of all steps, (branches, rows, block_frames, dim)."""
        embed = self.estimator.input_embed
        conditional = embed.of_conditions(batch.cond.transpose(1, 2), batch.mu.transpose(1, 2), batch.speakers)
        given = conditional.new_empty(self.cache.layout.branches, *conditional.shape)
        given[0] = conditional
        given[1:] = embed.proj.bias  # without conditions only the bias is left
        return given


class TorchStep(DiTStep):
    """Step function on torch."""

    def __call__(self, batch: Batch) -> Velocity:
        embed, given = self.estimator.input_embed, self.of_conditions(batch)
        rope = self.estimator.rotary_embed(block_table.positions(batch.table, batch.block_frames))
        cos, sin = (angles.repeat(len(given), 1, 1) for angles in rope)
        memory = _BlockMemory(batch, self.cache)

        def velocity(step: int) -> torch.Tensor:
            memory.step = step
            h = (given + embed.of_state(batch.x.transpose(1, 2))).flatten(0, 1)
            return self.estimator.velocity_of(
                embed.placed(h, memory), self.tables.modulation[step], (cos, sin), None, memory
            )

        return velocity


class _BlockMemory:
    """The estimator's `Memory` for a batch of blocks.

    Args:
        batch: of blocks.
        cache: of keys and values.

    Attributes:
        step: of the ODE, now.
    """

    def __init__(self, batch: Batch, cache: PagedKVCache) -> None:
        self.step = 0
        self._cache = cache
        self._branches, self._frames = cache.layout.branches, batch.block_frames
        self._new = cache.index([block.pages[-1] for block in batch.blocks])
        self._seen = [(cache.index(pages), frames) for pages, frames in _read_together(batch.blocks, self._frames)]
        ends = [(row, block) for row, block in enumerate(batch.blocks) if block.last]
        # Of every chunk: what its stream keeps, rows of its blocks, and how many frames they have.
        self._chunks = [
            (state, slice(row - block.before // self._frames, row + 1), block.before + block.valid)
            for state, (row, block) in zip(batch.conv_state, ends, strict=True)
        ]

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (self._branches, -1))  # (branches, blocks, dim, block_frames)
        windows = []
        for conv_state, blocks, frames in self._chunks:
            state = conv_state[self.step, index]
            extended = torch.cat((state, x[:, blocks].transpose(1, 2).flatten(2)), dim=2)
            state.copy_(extended[..., frames : frames + CONTEXT_FRAMES])
            windows.append(extended.unfold(2, CONTEXT_FRAMES + self._frames, self._frames).transpose(1, 2))
        return conv(torch.cat(windows, dim=1).flatten(0, 1))

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Lets every block attend to the pages of its table.

        The blocks' own keys and values are read back from the cache, so that what a frame sees does not depend on how
        blocks were grouped into chunks, whatever the storage type.
        """
        q, k, v = (value.unflatten(0, (self._branches, -1)) for value in (q, k, v))  # (branches, blocks, frames, inner)
        view = self._cache.layer(self.step, layer)
        view.write(self._new, k, v)
        queries, rows = iter(q.unbind(1)), []
        for pages, seen in self._seen:
            k, v = view.read(pages, seen[-1], q.dtype)
            rows += [attend(next(queries), k[:, :frames], v[:, :frames], None) for frames in seen]
        return torch.stack(rows, dim=1).flatten(0, 1)


def _read_together(blocks: Sequence[Block], block_frames: int) -> list[tuple[list[int], list[int]]]:
    """Pages to read at once, and how many of their frames each of some blocks sees, without the padding of its own.

    Blocks of a chunk see one another, each a page more than the one before it, unless a window moves on with them.
    """
    reads: list[tuple[list[int], list[int]]] = []
    for block in blocks:
        frames = (len(block.pages) - 1) * block_frames + block.valid
        if block.before and block.pages[:-1] == reads[-1][0]:
            reads[-1] = block.pages, [*reads[-1][1], frames]
        else:
            reads.append((block.pages, [frames]))
    return reads
