"""Block tables and pages, as the kernels of the Triton language read them."""

from __future__ import annotations

import torch
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
