"""Block tables and pages, as the kernels of the Triton language read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.cache.paged_kv_cache import LayerView
from token2wav.execution import block_table
from token2wav.execution.block_table import Column

# Columns of block tables, as constants for kernels.
START = tl.constexpr(Column.START.value)
VALID = tl.constexpr(Column.VALID.value)
NUM_CAUSAL_PAGES = tl.constexpr(Column.NUM_CAUSAL_PAGES.value)
BEFORE = tl.constexpr(Column.BEFORE.value)
CHUNK = tl.constexpr(Column.CHUNK.value)
LAST = tl.constexpr(Column.LAST.value)
PROMPT_PADDING = tl.constexpr(Column.PROMPT_PADDING.value)
NUM_PAGES = tl.constexpr(Column.NUM_PAGES.value)
SHARED_PAGES = tl.constexpr(Column.SHARED_PAGES.value)
HEADER = tl.constexpr(block_table.HEADER)

# Arguments that differ from batch to batch. For other arguments Triton compiles separate binaries
# for the value 1 and for multiples of 16. It must not do so for these, because no wide load depends
# on them, and because compiling takes seconds.
OF_A_BATCH = ("blocks", "width", "pages")


def rows_of(table: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Returns the arguments of a kernel for a block table: the table, its rows and its columns."""
    return table, *table.shape


def sizes_of(view: LayerView) -> dict[str, int]:
    """Returns the arguments of a kernel for the sizes of a page of the cache."""
    return dict(zip(("BLOCK_FRAMES", "HEADS", "DIM"), view.data.shape[3:], strict=True))


@triton.jit
def tile_of_keys(begin, end, header, KEYS: tl.constexpr, BLOCK_FRAMES: tl.constexpr):
    """Returns positions (keys,) in the pages of the table row at `header`, and their pages.

    A page is looked up once for all of its frames.
    """
    key = begin + tl.arange(0, KEYS)
    index, first = key // BLOCK_FRAMES, begin // BLOCK_FRAMES
    page = tl.zeros_like(index)
    # A tile may begin with the last frame of a page.
    for part in tl.static_range((KEYS + BLOCK_FRAMES - 2) // BLOCK_FRAMES + 1):
        page_index = first + part
        entry = header + HEADER + page_index
        found = tl.load(entry, mask=page_index * BLOCK_FRAMES < end, other=0)
        page = tl.where(index == page_index, found, page)
    return key, page.to(tl.int64)
