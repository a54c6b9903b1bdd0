"""Columns of block tables as kernels know them, and the arguments that make no binary of their own."""

from __future__ import annotations

import triton.language as tl

from token2wav.execution import block_table

VALID = tl.constexpr(block_table.VALID)
SEEN = tl.constexpr(block_table.SEEN)
BEFORE = tl.constexpr(block_table.BEFORE)
CHUNK = tl.constexpr(block_table.CHUNK)
LAST = tl.constexpr(block_table.LAST)
HEADER = tl.constexpr(block_table.HEADER)

# Arguments that differ from batch to batch. Other arguments have a binary of their own for 1 and for multiples of 16;
# these have not, because no wide load depends on them, and because compiling takes seconds.
OF_A_BATCH = ("blocks", "width", "pages")
