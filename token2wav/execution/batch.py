"""Batch of attention blocks: the tensors in which blocks of several chunks and streams are computed
together. Each row of a tensor is one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from token2wav.cache.paged_kv_cache import CacheLayout
from token2wav.cache.states import StateRows, StateStore
from token2wav.execution.block_table import HEADER, Block, ChunkPlace, slots_of, write_table
from token2wav.execution.staging import IntegerTensors


@dataclass(frozen=True, eq=False)
class ChunkInput:
    """Input of the estimator for one chunk of one stream."""

    noise: torch.Tensor  # (bands, frames) start of the ODE
    mu: torch.Tensor  # (bands, frames) condition from the tokens
    cond: torch.Tensor  # (bands, frames) condition from the prompt mel
    speaker: torch.Tensor
    place: ChunkPlace


@dataclass(frozen=True, order=True)
class BatchSize:
    """Capacity of a batch.

    A batch is either aligned or flat. In an aligned batch every chunk has room for the same number
    of blocks. In a flat batch each chunk has room for exactly its own blocks.

    Attributes:
        rows: chunks of an aligned batch, or blocks of a flat batch.
        blocks_per_chunk: blocks for each chunk of an aligned batch; 1 for a flat batch.
        past_pages: room for the pages before a chunk of an aligned batch, or before a block of a
            flat batch.
    """

    rows: int
    blocks_per_chunk: int
    past_pages: int

    @classmethod
    def of(cls, places: Sequence[ChunkPlace], *, aligned: bool) -> BatchSize:
        """Returns the smallest size that holds chunks."""
        if aligned:
            past = max(len(place.tables[0]) for place in places) - 1
            return cls(len(places), len(places[0].tables), past)
        tables = [table for place in places for table in place.tables]
        return cls(len(tables), 1, max(len(table) for table in tables) - 1)

    def fits(self, other: BatchSize) -> bool:
        return (
            self.rows <= other.rows
            and self.blocks_per_chunk <= other.blocks_per_chunk
            and self.past_pages <= other.past_pages
        )

    @property
    def blocks(self) -> int:
        return self.rows * self.blocks_per_chunk

    @property
    def cost(self) -> int:
        """Cost of attention, in arbitrary units."""
        return self.blocks * self.pages

    @property
    def pages(self) -> int:
        """Pages that the table of a block has room for."""
        return self.past_pages + self.blocks_per_chunk


class Batch:
    """Tensors for batches of one size. They stay at their addresses, so that CUDA graphs can use
    them, and are filled anew for every batch.

    Args:
        rows: rows for estimator states, at least one for each chunk. Batches that never run at the
            same time may share them.
        integrate: integrates `x` from noise to mel, in place.

    Attributes:
        blocks: blocks of the present batch, which may be fewer than the rows.
        x: (rows, bands, block_frames) state of the ODE, for `rows = size.blocks`. `mu` and `cond`
            have this shape.
        conv_state: (size.rows, steps, branches, width) convolution states of the estimator, one row
            for each chunk.
    """

    def __init__(
        self,
        size: BatchSize,
        layout: CacheLayout,
        states: StateStore,
        rows: StateRows,
        integrate: Callable[[Batch], None],
    ) -> None:
        self.size = size
        self.block_frames = layout.block_frames
        self.blocks: list[Block] = []
        self._integrate = integrate
        self._states, self._rows = states, rows.first(size.rows)
        [self.conv_state] = self._rows.views.values()
        device, shape = self.conv_state.device, (size.blocks, layout.bands, layout.block_frames)
        self.x, self.mu, self.cond = (torch.zeros(shape, device=device) for _ in range(3))
        self.speakers = torch.zeros(size.blocks, layout.bands, device=device)
        # The slots have two rows: the slots to read states from, and the slots to write states to.
        shapes = (size.blocks, HEADER + size.pages), (2, size.rows)
        self._integers = IntegerTensors(shapes, device)
        self.table, self._slots = self._integers.tensors
        self._zeros = torch.zeros(layout.bands, 1, device=device)

    def fill(self, chunks: Sequence[ChunkInput]) -> None:
        """Copies chunks into the tensors. Unused rows keep old data, which no block reads.

        One launch joins the tensors of all chunks.
        """
        self.blocks = []
        rows, row = np.zeros(tuple(self.table.shape), np.int32), 0
        for number, chunk in enumerate(chunks):
            self.blocks += write_table(rows[row:], chunk.place, number, self.block_frames)
            row += self._room(chunk)
        self._integers.fill(rows, slots_of([chunk.place for chunk in chunks], self._slots.shape[1]))
        count = len(chunks)
        self._states.read(self._slots[0, :count], self._rows.first(count))
        self._spread(self.x, [chunk.noise for chunk in chunks])
        self._spread(self.mu, [chunk.mu for chunk in chunks])
        self._spread(self.cond, [chunk.cond for chunk in chunks])
        speakers = [chunk.speaker for chunk in chunks for _ in range(self._room(chunk))]
        torch.stack(speakers, out=self.speakers[: len(speakers)])

    def compute(self) -> None:
        self._integrate(self)

    def take(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        """Returns the mel (bands, frames) of every chunk, and stores the states after the
        chunks.
        """
        count = len(chunks)
        self._states.write(self._slots[1, :count].long(), self._rows.first(count))
        # (bands, rows * block_frames), in one copy
        mel = self.x.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(1)
        mels, row = [], 0
        for chunk in chunks:
            first = row * self.block_frames
            mels.append(mel[:, first : first + chunk.place.length])
            row += self._room(chunk)
        return mels

    def _room(self, chunk: ChunkInput) -> int:
        return max(self.size.blocks_per_chunk, len(chunk.place.tables))

    def _spread(self, rows: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Writes the frames (bands, frames) of every chunk into its rows, and zeros after them."""
        size, least = self.block_frames, self.size.blocks_per_chunk * self.block_frames
        pieces = []
        for part in parts:
            room = max(least - part.shape[1], -part.shape[1] % size)
            pieces += [part, self._zeros.expand(-1, room)] if room else [part]
        blocks = torch.cat(pieces, dim=1).unflatten(1, (-1, size)).transpose(0, 1)
        rows[: len(blocks)] = blocks
