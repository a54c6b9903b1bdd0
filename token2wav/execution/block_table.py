"""Block tables of a batch as one table of integers on the device: all that kernels and graphs know of its blocks.

A row for each block: a header, then the pages that its frames see in order, its own last. What is behind the last of
them is not read. A row of zeros stands for no block.
"""

from __future__ import annotations

import torch

# Columns of the header.
START = 0  # position of the block's first frame
VALID = 1  # frames of the block; what follows them is padding
SEEN = 2  # pages that it sees
BEFORE = 3  # frames of the same chunk that come before the block; they are in the rows above it
CHUNK = 4  # number of its chunk in the batch
LAST = 5  # 1 for the last block of a chunk
HEADER = 6


def positions(table: torch.Tensor, frames: int) -> torch.Tensor:
    """(blocks, frames) positions of the frames of every block, padding included."""
    return table[:, START, None] + torch.arange(frames, device=table.device)
