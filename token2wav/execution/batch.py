"""Batch of attention blocks: the tensors in which blocks of several chunks and streams are computed
together. Each row of a tensor is one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.cache.paged_kv_cache import CacheLayout
from token2wav.cache.states import SCRATCH_SLOT, StateRows, StateStore
from token2wav.execution.staging import IntegerTensors

# The block table of a batch is a tensor on the device with one row of integers for each block.
# Kernels and graphs read all properties of a block from this row. The row starts with a header,
# whose columns are named here. After the header come the pages that the block attends to, in order.
# The last of these pages is the page of the block itself, except under full prompt attention. The
# rest of the row is not read. A row of zeros holds no block.
START = 0  # position of the first frame of the block
VALID = 1  # number of frames of the block; the rest of its page is padding
NUM_CAUSAL_PAGES = 2  # number of pages that the block attends to, up to its own page
BEFORE = 3  # number of frames of the same chunk before the block; the rows above hold these frames
CHUNK = 4  # index of the chunk in the batch
LAST = 5  # 1 for the last block of a chunk
PROMPT_PADDING = 6  # number of padding frames at the start of the stream, in its first page
NUM_PAGES = 7  # number of all pages that the block attends to, including later pages of its chunk
# Number of the first pages that all blocks of the chunk attend to. Own pages of its blocks do not
# count, except under full prompt attention. So a kernel reads these pages once for many blocks, and
# needs no mask for their frames, apart from padding of the prompt.
SHARED_PAGES = 8
HEADER = 9  # number of columns of the header


class ChunkBlocks(Protocol):
    """Place of a chunk among the blocks of its stream. Positions are frames for the estimator, and
    tokens for the encoder.
    """

    @property
    def start(self) -> int:
        """First position, a multiple of the block, counted from the start of the stream with its
        padding.
        """

    @property
    def length(self) -> int:
        """Number of positions, with the padding in front."""

    @property
    def slot(self) -> int:
        """Slot of the stream in the state store."""

    @property
    def provisional(self) -> bool:
        """Whether the state after the chunk is dropped."""

    @property
    def tables(self) -> list[list[int]]:
        """For each block the pages that it attends to, in order; its own page comes last."""

    @property
    def prompt_padding(self) -> int:
        """Number of padding positions at the start of the stream."""

    @property
    def full_prompt_attention(self) -> bool:
        """Whether every block attends to the later blocks of the chunk too."""


@dataclass(frozen=True, eq=False)
class ChunkInput:
    """Input of the estimator for one chunk of one stream.

    Attributes:
        noise: (bands, frames) start of the ODE.
        mu: (bands, frames) condition from the tokens.
        cond: (bands, frames) condition from the prompt mel.
        speaker: (bands,) speaker vector.
        start: position of the first frame, counted from the start of the prompt with its padding.
            It is a multiple of the length of a block.
        tables: for each block the pages that it attends to, in order; its own page comes last.
        slot: slot of the stream in the state store. It holds the state of the convolutions before
            the chunk.
        provisional: whether the state after the chunk is dropped. If not, it replaces the state in
            the slot.
        prompt_padding: number of padding frames at the start of the stream. The first page of every
            table begins with them.
        full_prompt_attention: whether every block also attends to the later blocks of the chunk, as
            if the chunk were one block.
    """

    noise: torch.Tensor
    mu: torch.Tensor
    cond: torch.Tensor
    speaker: torch.Tensor
    start: int
    tables: list[list[int]]
    slot: int
    provisional: bool = False
    prompt_padding: int = 0
    full_prompt_attention: bool = False

    @property
    def length(self) -> int:
        return self.noise.shape[1]


@dataclass(frozen=True)
class Block:
    """One block of a batch, as the host builds its row of the block table.

    The fields without a description here are the columns of the header that have the same names.

    Attributes:
        pages: pages that the block attends to, in order; its own page comes last.
        chunk_pages: pages of the last block of the chunk, which every block of the chunk attends to
            under full prompt attention; None without it.
    """

    start: int
    valid: int
    before: int
    chunk: int
    last: bool
    pages: list[int]
    prompt_padding: int = 0
    chunk_pages: list[int] | None = None
    shared_pages: int = 0

    @property
    def row(self) -> list[int]:
        """Row of the block table."""
        seen, visible = len(self.pages), self.chunk_pages or self.pages
        header = [
            self.start,
            self.valid,
            seen,
            self.before,
            self.chunk,
            int(self.last),
            self.prompt_padding,
            len(visible),
            self.shared_pages,
        ]
        return header + visible


@dataclass(frozen=True, order=True)
class BatchSize:
    """Capacity of a batch.

    A batch is either aligned or flat. In an aligned batch every chunk has room for the same number
    of blocks. In a flat batch each chunk has room for exactly its own blocks.

    Attributes:
        rows: number of chunks of an aligned batch, or number of blocks of a flat batch.
        blocks_per_chunk: number of blocks for each chunk of an aligned batch; 1 for a flat batch.
        past_pages: room for past pages. In an aligned batch these are the pages before the chunk.
            In a flat batch they are the pages before the block.
    """

    rows: int
    blocks_per_chunk: int
    past_pages: int

    @classmethod
    def of(cls, chunks: Sequence[ChunkBlocks], *, aligned: bool) -> BatchSize:
        """Returns the smallest size that holds the chunks; `aligned` selects an aligned batch."""
        if aligned:
            each, past = len(chunks[0].tables), max(len(chunk.tables[0]) for chunk in chunks) - 1
            return cls(len(chunks), each, past)
        tables = [table for chunk in chunks for table in chunk.tables]
        return cls(len(tables), 1, max(len(table) for table in tables) - 1)

    def fits(self, other: BatchSize) -> bool:
        """Returns whether a batch of this size can run in the tensors of another size."""
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
        """Cost of attention in a batch of this size, in arbitrary units."""
        return self.blocks * self.pages

    @property
    def pages(self) -> int:
        """Number of pages that the table of a block has room for."""
        return self.past_pages + self.blocks_per_chunk


def frame_positions(table: torch.Tensor, frames: int) -> torch.Tensor:
    """Computes the positions (blocks, frames) of the frames of every block in a block table.

    Frames of padding have positions too.
    """
    return table[:, START, None] + torch.arange(frames, device=table.device)


class Batch:
    """Tensors for batches of one size. They stay at their addresses, so that CUDA graphs can use
    them, and are filled anew for every batch.

    Args:
        size: capacity of the batch.
        layout: layout of the key-value cache.
        states: state store of all streams.
        rows: rows for the states of the estimator, at least one for each chunk. Batches that never
            run at the same time may share them.
        integrate: integrates `x` from noise to mel, in place.

    Attributes:
        blocks: blocks of the present batch. There may be fewer blocks than rows.
        x: (rows, bands, block_frames) state of the ODE, for `rows = size.blocks`.
        mu: (rows, bands, block_frames) condition from the tokens.
        cond: (rows, bands, block_frames) condition from the prompt mel.
        speakers: (rows, bands) speaker vectors.
        conv_state: (size.rows, steps, branches, width) state of the convolutions of the estimator,
            one row for each chunk.
        table: (rows, columns) int32 block table.
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

        The number of launches does not depend on the number of chunks, because one launch joins
        the tensors of all chunks.
        """
        self.blocks = []
        rows, row = np.zeros(tuple(self.table.shape), np.int32), 0
        for number, chunk in enumerate(chunks):
            self.blocks += write_table(rows[row:], chunk, number, self.block_frames)
            row += self._room(chunk)
        self._integers.fill(rows, slots_of(chunks, self._slots.shape[1]))
        count = len(chunks)
        self._states.read(self._slots[0, :count], self._rows.first(count))
        self._spread(self.x, [chunk.noise for chunk in chunks])
        self._spread(self.mu, [chunk.mu for chunk in chunks])
        self._spread(self.cond, [chunk.cond for chunk in chunks])
        speakers = [chunk.speaker for chunk in chunks for _ in range(self._room(chunk))]
        torch.stack(speakers, out=self.speakers[: len(speakers)])

    def compute(self) -> None:
        """Integrates the batch from noise to mel."""
        self._integrate(self)

    def take(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        """Returns the mel (bands, frames) of every chunk, and stores the states after the chunks.

        Call it after `compute`, when `x` holds the end of the ODE.
        """
        count = len(chunks)
        self._states.write(self._slots[1, :count].long(), self._rows.first(count))
        # (bands, rows * block_frames), in one copy
        mel = self.x.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(1)
        mels, row = [], 0
        for chunk in chunks:
            first = row * self.block_frames
            mels.append(mel[:, first : first + chunk.length])
            row += self._room(chunk)
        return mels

    def _room(self, chunk: ChunkInput) -> int:
        return max(self.size.blocks_per_chunk, len(chunk.tables))

    def _spread(self, rows: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Writes the frames (bands, frames) of every chunk into its rows, and zeros after them."""
        size, least = self.block_frames, self.size.blocks_per_chunk * self.block_frames
        pieces = []
        for part in parts:
            room = max(least - part.shape[1], -part.shape[1] % size)
            pieces += [part, self._zeros.expand(-1, room)] if room else [part]
        blocks = torch.cat(pieces, dim=1).unflatten(1, (-1, size)).transpose(0, 1)
        rows[: len(blocks)] = blocks


def write_table(
    rows: NDArray[np.int32], chunk: ChunkBlocks, number: int, block: int
) -> list[Block]:
    """Writes the blocks of one chunk into the first rows of a block table.

    Args:
        rows: (rows, columns) zeros.
        chunk: place of the chunk.
        number: index of the chunk in the batch.
        block: positions of a block.

    Returns:
        The blocks.
    """
    blocks = blocks_of(chunk, number, block)
    for row, each in zip(rows, blocks, strict=False):
        values = each.row
        row[: len(values)] = values
    return blocks


def slots_of(chunks: Sequence[ChunkBlocks], room: int) -> NDArray[np.int64]:
    """Returns the slots (2, room) of the states before and after chunks. The scratch slot follows
    them, and stands for the states that are dropped.
    """
    slots = np.full((2, room), SCRATCH_SLOT)
    slots[0, : len(chunks)] = [chunk.slot for chunk in chunks]
    slots[1, : len(chunks)] = [
        SCRATCH_SLOT if chunk.provisional else chunk.slot for chunk in chunks
    ]
    return slots


def blocks_of(chunk: ChunkBlocks, number: int, block: int) -> list[Block]:
    """Returns the blocks of one chunk; `number` is its index in the batch."""
    whole = chunk.tables[-1] if chunk.full_prompt_attention else None
    shared = _shared_pages(whole or chunk.tables[0], chunk.tables[-1])
    return [
        Block(
            start=chunk.start + before,
            valid=min(block, chunk.length - before),
            before=before,
            chunk=number,
            last=index == len(chunk.tables) - 1,
            pages=pages,
            prompt_padding=chunk.prompt_padding,
            chunk_pages=whole,
            shared_pages=shared,
        )
        for index, (before, pages) in enumerate(
            zip(range(0, chunk.length, block), chunk.tables, strict=True)
        )
    ]


def _shared_pages(first: list[int], last: list[int]) -> int:
    """Returns the number of pages, without the last one, at the start of the first block's table
    that are also at the start of the last block's table.

    A window of past blocks that moves on from block to block drops pages behind the prompt.
    """
    most = len(first) - 1
    if first[:most] == last[:most]:
        return most
    return next(index for index in range(most) if first[index] != last[index])
