"""Block tables: the rows of integers by which kernels and graphs find the blocks of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from token2wav.cache.states import SCRATCH_SLOT


class Column(IntEnum):
    """Header columns of a block table.

    The block table of a batch is a tensor on the device with one row of integers for each block.
    After the header come the pages that the block attends to, in order. The last of these pages is
    the page of the block itself, except under full prompt attention. The rest of the row is not
    read. A row of zeros holds no block.
    """

    START = 0  # position of the first frame of the block
    VALID = 1  # frames of the block; the rest of its page is padding
    NUM_CAUSAL_PAGES = 2  # pages that the block attends to, up to its own page
    BEFORE = 3  # frames of the chunk before the block; the rows above hold these frames
    CHUNK = 4  # index of the chunk in the batch
    LAST = 5  # 1 for the last block of a chunk
    PROMPT_PADDING = 6  # padding frames at the start of the stream, in its first page
    NUM_PAGES = 7  # all pages that the block attends to, with later pages of its chunk


HEADER = len(Column)  # header columns


@dataclass(frozen=True)
class ChunkPlace:
    """Place of a chunk among the blocks of its stream. Positions are frames for the estimator, and
    tokens for the encoder.

    Attributes:
        start: first position, a multiple of the block, counted from the start of the stream with
            its padding.
        length: positions, with the padding in front.
        tables: for each block the pages that it attends to, in order; its own page comes last.
        slot: slot of the stream in the state store. It holds the state before the chunk.
        provisional: whether the state after the chunk is dropped.
        prompt_padding: padding positions at the start of the stream. The first page of every table
            begins with them.
        full_prompt_attention: whether every block also attends to the later blocks of the chunk, as
            if the chunk were one block.
    """

    start: int
    length: int
    tables: list[list[int]]
    slot: int
    provisional: bool = False
    prompt_padding: int = 0
    full_prompt_attention: bool = False

    @property
    def padding(self) -> int:
        """Padding positions in front of the chunk."""
        return 0 if self.start else self.prompt_padding

    def scaled(self, ratio: int) -> ChunkPlace:
        return replace(
            self,
            start=ratio * self.start,
            length=ratio * self.length,
            prompt_padding=ratio * self.prompt_padding,
        )


@dataclass(frozen=True)
class Block:
    """One block of a batch, as the host builds its row of the block table.

    The fields without a description here are the header columns with the same names.

    Attributes:
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

    @property
    def row(self) -> list[int]:
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
        ]
        return header + visible


def write_table(rows: NDArray[np.int32], place: ChunkPlace, number: int, block: int) -> list[Block]:
    """Writes the blocks of chunk `number` of a batch into the first of `rows` (rows, columns),
    which are zeros, and returns them.
    """
    blocks = blocks_of(place, number, block)
    for index, entry in enumerate(blocks):
        values = entry.row
        rows[index, : len(values)] = values
    return blocks


def slots_of(places: Sequence[ChunkPlace], room: int) -> NDArray[np.int64]:
    """Returns the slots (2, room) of the states before and after chunks. The scratch slot follows
    them, and stands for the states that are dropped.
    """
    slots = np.full((2, room), SCRATCH_SLOT)
    slots[0, : len(places)] = [place.slot for place in places]
    slots[1, : len(places)] = [
        SCRATCH_SLOT if place.provisional else place.slot for place in places
    ]
    return slots


def blocks_of(place: ChunkPlace, number: int, block: int) -> list[Block]:
    whole = place.tables[-1] if place.full_prompt_attention else None
    return [
        Block(
            start=place.start + before,
            valid=min(block, place.length - before),
            before=before,
            chunk=number,
            last=index == len(place.tables) - 1,
            pages=pages,
            prompt_padding=place.prompt_padding,
            chunk_pages=whole,
        )
        for index, (before, pages) in enumerate(
            zip(range(0, place.length, block), place.tables, strict=True)
        )
    ]


def frame_positions(table: torch.Tensor, frames: int) -> torch.Tensor:
    """Computes all frame positions (blocks, frames), padding included."""
    return table[:, Column.START, None] + torch.arange(frames, device=table.device)
