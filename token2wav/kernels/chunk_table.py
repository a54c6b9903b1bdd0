"""What kernels must know of the chunks in a batch, as one table of integers on the device.

A row for each stream: a header, then the pages that its frames can see in order, those of the past before its own, then
the number of each page's block within the utterance. What is behind the last of them is not read.
"""

from __future__ import annotations

import torch
import triton.language as tl

# Columns of the header.
START = tl.constexpr(0)  # position of the chunk's first frame
FRAMES = tl.constexpr(1)  # of the chunk; 0 where the batch has room for a stream but none is there
PAST = tl.constexpr(2)  # pages of the past
PREFIX = tl.constexpr(3)  # blocks at the start of the utterance that are always seen
HEADER = tl.constexpr(4)

# Arguments that differ from batch to batch. Other arguments have a binary of their own for 1 and for multiples of 16;
# these have not, because no wide load depends on them, and because compiling takes seconds.
OF_A_BATCH = ("streams", "frames", "width", "pages", "left_blocks")


def table_width(pages: int) -> int:
    """Columns of a table with room for some pages."""
    return HEADER.value + 2 * pages


def pages_of(width: int) -> int:
    """Pages that a table with some columns has room for."""
    return (width - HEADER.value) // 2


def positions(table: torch.Tensor, frames: int) -> torch.Tensor:
    """(streams, frames) positions of the frames of every stream, padding included."""
    return table[:, START.value, None] + torch.arange(frames, device=table.device)
