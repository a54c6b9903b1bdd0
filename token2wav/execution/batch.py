"""Batch of blocks: what is computed together is a flat list of blocks, whatever chunks and streams
they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from token2wav.cache.paged_kv_cache import CacheLayout

# Columns of the header of a block table: a row of integers on the device for each block, all that
# kernels and graphs know of it. Behind the header stand the pages that its frames see in order, its
# own last but in joined chunks; what follows is not read. A row of zeros stands for no block.
START = 0  # position of the block's first frame
VALID = 1  # frames of the block; what follows them is padding
NUM_CAUSAL_PAGES = 2  # pages that it sees up to its own
BEFORE = 3  # frames of the same chunk that come before the block; they are in the rows above it
CHUNK = 4  # number of its chunk in the batch
LAST = 5  # 1 for the last block of a chunk
PROMPT_PADDING = 6  # frames at the stream's start that there are not; they are in the first page
NUM_PAGES = 7  # pages that it sees, with those after its own in a joined chunk
HEADER = 8


@dataclass(frozen=True, eq=False)
class ChunkInput:
    """One chunk of one stream."""

    noise: torch.Tensor  # (bands, frames) start of the ODE, and so its conditions
    mu: torch.Tensor
    cond: torch.Tensor
    speaker: torch.Tensor  # (bands,)
    # position of the first frame, counted from the start of the prompt, a multiple of the block
    start: int
    tables: list[list[int]]  # pages that each block sees in order, its own last
    # (steps, *layout.conv_state) what the estimator keeps beside keys and values; replaced in place
    # by that at the end.
    conv_state: torch.Tensor
    # frames at the stream's start that there are not; they are in the first page of every table
    prompt_padding: int = 0
    # its blocks see those that follow them too, as if the chunk were one block
    full_prompt_attention: bool = False

    @property
    def frames(self) -> int:
        return self.noise.shape[1]


@dataclass(frozen=True)
class Block:
    """One row of a batch. The columns of a block table say what its numbers mean."""

    start: int
    valid: int
    before: int
    chunk: int
    last: bool
    pages: list[int]  # that it sees, its own last
    prompt_padding: int = 0
    # pages that every block of a chunk sees under full prompt attention: the pages of its last block
    chunk_pages: list[int] | None = None

    @property
    def row(self) -> list[int]:
        """Of the table."""
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


@dataclass(frozen=True, order=True)
class BatchSize:
    """Room in a batch."""

    # chunks, if all have room for as many blocks; else blocks, of which chunks have as many as they
    # need
    rows: int
    blocks_per_chunk: (
        int  # blocks that a chunk has room for; 1 if it takes as many rows as it needs
    )
    past_pages: int  # pages that a block sees before the blocks of its chunk, or before itself

    @classmethod
    def of(cls, chunks: Sequence[ChunkInput], *, aligned: bool) -> BatchSize:
        """The smallest that takes chunks; if `aligned` all of them have room for as many blocks."""
        if aligned:
            each, past = len(chunks[0].tables), max(len(chunk.tables[0]) for chunk in chunks) - 1
            return cls(len(chunks), each, past)
        tables = [table for chunk in chunks for table in chunk.tables]
        return cls(len(tables), 1, max(len(table) for table in tables) - 1)

    def fits(self, other: BatchSize) -> bool:
        """Whether a batch of this size can run in another."""
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
        """Cost of attention in it, in arbitrary units."""
        return self.blocks * self.pages

    @property
    def pages(self) -> int:
        """That a block's table has room for."""
        return self.past_pages + self.blocks_per_chunk


def frame_positions(table: torch.Tensor, frames: int) -> torch.Tensor:
    """(blocks, frames) positions of the frames of every block in a table, padding included."""
    return table[:, START, None] + torch.arange(frames, device=table.device)


class Batch:
    """Tensors of one size that stay where they are, filled anew for every batch.

    Args:
        size, layout: room, and sizes of the cache.
        conv_state: tensor to use for it, which batches that never run at once may share, (chunks,
            steps, *layout.conv_state); its device is that of the batch.

    Attributes:
        blocks: of the batch, in rows of its tensors; there may be fewer than rows.
        x: (rows, bands, block_frames) state of the ODE.
        mu, cond: (rows, bands, block_frames); speakers: (rows, bands).
        conv_state: see `ChunkInput`, a row for each chunk.
        table: (rows, columns) int32 block tables.
    """

    def __init__(self, size: BatchSize, layout: CacheLayout, conv_state: torch.Tensor) -> None:
        self.size = size
        self.block_frames = layout.block_frames
        self.blocks: list[Block] = []
        device, shape = conv_state.device, (size.blocks, layout.bands, layout.block_frames)
        self.x, self.mu, self.cond = (torch.zeros(shape, device=device) for _ in range(3))
        self.speakers = torch.zeros(size.blocks, layout.bands, device=device)
        self.conv_state = conv_state[: size.rows]
        self.table = torch.zeros(size.blocks, HEADER + size.pages, dtype=torch.int32, device=device)
        # Copied from memory that the device reads by itself, so that the host need not wait for
        # what runs there.
        self._staged = torch.zeros_like(self.table, device="cpu", pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, chunks: Sequence[ChunkInput]) -> None:
        """Puts chunks in; what is in rows that are left over is not read by others."""
        self.blocks = []
        if self._copied:
            self._copied.synchronize()  # the copy for the batch before, which is long done
        rows, row = self._staged.numpy(), 0
        rows[:, :HEADER] = 0
        for number, chunk in enumerate(chunks):
            blocks = blocks_of(chunk, number, self.block_frames)
            for own, block in zip(rows[row:], blocks, strict=False):
                row_of_table = block.row
                own[: len(row_of_table)] = row_of_table
            self.blocks += blocks
            row += self._room(chunk)
        self.table.copy_(self._staged, non_blocking=True)
        if self._copied:
            self._copied.record()
        self._spread(self.x, [chunk.noise for chunk in chunks])
        self._spread(self.mu, [chunk.mu for chunk in chunks])
        self._spread(self.cond, [chunk.cond for chunk in chunks])
        speakers = [chunk.speaker for chunk in chunks for _ in range(self._room(chunk))]
        torch.stack(speakers, out=self.speakers[: len(speakers)])
        torch.stack([chunk.conv_state for chunk in chunks], out=self.conv_state[: len(chunks)])

    def take(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        """Mels (bands, frames) of chunks once `x` is their state at the end; streams get their
        `conv_state` back.
        """
        for chunk, after in zip(chunks, self.conv_state.unbind(), strict=False):
            chunk.conv_state.copy_(after)
        mel = self.x.clone().transpose(0, 1).flatten(1)  # (bands, rows * block_frames)
        mels, row = [], 0
        for chunk in chunks:
            first = row * self.block_frames
            mels.append(mel[:, first : first + chunk.frames])
            row += self._room(chunk)
        return mels

    def _room(self, chunk: ChunkInput) -> int:
        return max(self.size.blocks_per_chunk, len(chunk.tables))

    def _spread(self, rows: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Writes (bands, frames) of every chunk into its rows, and zeros behind it."""
        size, least = self.block_frames, self.size.blocks_per_chunk * self.block_frames
        padded = [
            F.pad(part, (0, max(least - part.shape[1], -part.shape[1] % size))) for part in parts
        ]
        blocks = torch.cat(padded, dim=1).unflatten(1, (-1, size)).transpose(0, 1)
        rows[: len(blocks)] = blocks


def blocks_of(chunk: ChunkInput, number: int, block_frames: int) -> list[Block]:
    """Blocks of one chunk, which is the `number`th of its batch."""
    return [
        Block(
            start=chunk.start + before,
            valid=min(block_frames, chunk.frames - before),
            before=before,
            chunk=number,
            last=index == len(chunk.tables) - 1,
            pages=pages,
            prompt_padding=chunk.prompt_padding,
            chunk_pages=chunk.tables[-1] if chunk.full_prompt_attention else None,
        )
        for index, (before, pages) in enumerate(
            zip(range(0, chunk.frames, block_frames), chunk.tables, strict=True)
        )
    ]


def conv_states(chunks: int, layout: CacheLayout, device: torch.device) -> torch.Tensor:
    """Tensor that `Batch` takes as `conv_state`."""
    return torch.zeros(chunks, layout.steps, *layout.conv_state, device=device)
