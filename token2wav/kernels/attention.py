"""Paged attention: the queries of each block attend to keys and values in pages of the cache.

The row of a block in the block table lists the pages that the block attends to, in order. The
kernel reads the table on the device, so one captured launch serves every history. One program (an
instance of the kernel) computes a tile of queries of one head and block, with a running softmax.
All queries of a block attend to the same keys: from the first key after the padding of the prompt
to the last valid key of the last page.

A small batch has too few tiles to fill a GPU. Then the warps of a program compute different pages
for the same 16 queries, and the program combines their results at the end. So a long history is
split without a second launch and without atomic operations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from token2wav.cache.paged_kv_cache import LayerView
from token2wav.kernels import tiles
from token2wav.kernels.block_table import (
    HEADER,
    NUM_PAGES,
    OF_A_BATCH,
    PROMPT_PADDING,
    VALID,
    rows_of,
    sizes_of,
)
from token2wav.kernels.dependent_launch import launch_options, wait_for_earlier_kernel

# Score of a masked key. It is finite, because two infinite scores would have the difference NaN. It
# is a power of two, so that its product with the scale is exact. A GPU computes `scores * scale -
# higher * scale` as one fused operation, which rounds only the second product. With -1e30, the
# difference of two equal products was up to 1e22, and `exp2` of it was infinite.
_LEAST = tl.constexpr(-(2.0**100))
# A weight is multiplied by the scale of its value, and rounded to float16. The scale is at most a
# 127th of the largest value. This factor keeps small products in the range in which float16 has
# all of its bits.
_SCALE_UNIT = tl.constexpr(128.0)
_LOG2_E = 1 / math.log(2)


class _Tile(NamedTuple):
    """Tile of a program."""

    queries: int
    splits: int  # pages of an iteration; different warps compute them
    warps: int
    stages: int  # iterations whose loads are in flight


# On an H200 these tiles were the fastest of eleven, in an earlier form of this kernel. A wide tile
# of 128 queries took 1.1 to 2.3 times as long: it needs so many registers that a multiprocessor
# runs only one program. Compiled for compute capabilities 8.0, 9.0 and 10.0, both tiles fit into
# the registers.
_WIDE = _Tile(queries=64, splits=1, warps=4, stages=3)
_NARROW = _Tile(queries=16, splits=4, warps=4, stages=2)
# In float32, four pages do not fit into the shared memory of a small GPU.
_NARROW_FLOAT32 = _NARROW._replace(splits=2)
_NARROWEST = 16  # smallest matrix of the tensor cores; smaller pages are padded


@triton.jit
def _widened(x, dtype: tl.constexpr, SPLITS: tl.constexpr):
    """Converts keys or values to the dtype of the queries."""
    if x.dtype == tl.int8 and dtype == tl.float16 and SPLITS == 1:
        # A conversion instruction takes 8 cycles; this takes 3. For n from 0 to 255, 0x6400 + n are
        # the bits of 1024 + n in float16. Here n is x + 128. With splits, the registers would not
        # suffice.
        return (x.to(tl.int16) + 0x6480).to(tl.float16, bitcast=True) - 1152.0
    return x.to(dtype)


@triton.jit(do_not_specialize=OF_A_BATCH)
def _paged_attention(
    queries,  # (branches * blocks, BLOCK_FRAMES, QUERY_WIDTH): the first HEADS * DIM are queries
    out,  # (branches * blocks, BLOCK_FRAMES, HEADS * DIM)
    keys,  # (branches, pages, BLOCK_FRAMES, HEADS, DIM) of a layer
    values,
    key_scales,  # (branches, pages, BLOCK_FRAMES, HEADS), with float8 (branches, pages, 1, HEADS)
    value_scales,
    cos,  # (blocks, BLOCK_FRAMES, DIM)
    sin,
    table,
    blocks,
    width,
    pages,  # number of pages in the cache
    scale,
    BLOCK_FRAMES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2)
    block, branch = row % blocks, row // blocks
    # The host wrote the table, so these reads need not wait for the earlier kernel. They do not
    # depend on each other, so their latencies overlap.
    header = table + block * width
    valid, count = tl.load(header + VALID), tl.load(header + NUM_PAGES)
    start = tl.load(header + PROMPT_PADDING)
    split = tl.arange(0, SPLITS) if SPLITS > 1 else 0
    next_page = tl.load(header + HEADER + split, mask=split < width - HEADER, other=0)
    wait_for_earlier_kernel()

    frame = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    query_mask = frame < valid
    count = tl.where(tl.program_id(0) * QUERIES < valid, count, 0)
    query_index = (row.to(tl.int64) * BLOCK_FRAMES + frame)[:, None]
    column = tl.arange(0, DIM)[None, :]
    query_pointers = queries + query_index * QUERY_WIDTH + head * DIM
    query = tl.load(query_pointers + column, mask=query_mask[:, None], other=0.0)
    if head == 0:
        partner = tl.load(query_pointers + (column ^ 1), mask=query_mask[:, None], other=0.0)
        partner = partner.to(tl.float32)
        rotated = tl.where(column % 2 == 0, -partner, partner)
        angle = (block * BLOCK_FRAMES + frame)[:, None] * DIM + column
        c = tl.load(cos + angle, mask=query_mask[:, None], other=0.0)
        s = tl.load(sin + angle, mask=query_mask[:, None], other=0.0)
        query = (query.to(tl.float32) * c + rotated * s).to(query.dtype)

    if SPLITS > 1:
        query = tl.broadcast_to(query[None], (SPLITS, QUERIES, DIM))
        most = tl.full((SPLITS, QUERIES), _LEAST, tl.float32)
        total = tl.zeros((SPLITS, QUERIES), tl.float32)
        result = tl.zeros((SPLITS, QUERIES, DIM), tl.float32)
    else:
        most = tl.full((QUERIES,), _LEAST, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        result = tl.zeros((QUERIES, DIM), tl.float32)
    # A vector is the key or the value of one frame and head.
    head_vector = branch.to(tl.int64) * pages * (BLOCK_FRAMES * HEADS) + head
    keys += head_vector * DIM
    values += head_vector * DIM
    if key_scales is not None:
        # With float8 the vectors of a page and head have one scale; otherwise each has its own.
        page_has_scale = keys.dtype.element_ty == tl.float8e4nv
        head_scale = branch.to(tl.int64) * pages * HEADS + head if page_has_scale else head_vector
        key_scales += head_scale
        value_scales += head_scale

    # Index of a key in its page. The tile may be wider than the page.
    key = tl.arange(0, KEYS)
    in_page = key < BLOCK_FRAMES
    if SPLITS > 1:
        key, in_page = key[None, :], tl.broadcast_to(in_page[None, :], (SPLITS, KEYS))
    end = (count - 1) * BLOCK_FRAMES + valid
    for entry in range(0, count, SPLITS):
        index = entry + split
        page = tl.where(index < count, next_page, 0).to(tl.int64)
        # The number of a page is read one iteration ahead, because loads of its keys depend on it.
        next_page = tl.load(header + HEADER + index + SPLITS, mask=index + SPLITS < count, other=0)
        if SPLITS > 1:
            page, index = tl.expand_dims(page, 1), tl.expand_dims(index, 1)
        position = index * BLOCK_FRAMES + key
        # Masked keys and values are loaded as zeros, because a page may hold NaN there.
        visible = in_page & (position >= start) & (position < end)
        vector = page * (BLOCK_FRAMES * HEADS)  # the first vector of the page
        first = tl.expand_dims(vector * DIM, -1) if SPLITS > 1 else vector * DIM
        elements = tl.expand_dims(key * (HEADS * DIM), -1) + tl.arange(0, DIM)
        element_mask = tl.expand_dims(visible, -1)
        k = tl.load((keys + first) + elements, mask=element_mask, other=0.0)
        v = tl.load((values + first) + elements, mask=element_mask, other=0.0)
        k = _widened(k, query.dtype, SPLITS)
        k = tl.permute(k, (0, 2, 1)) if SPLITS > 1 else tl.trans(k)
        scores = tl.dot(query, k, input_precision="tf32x3")
        # The scales multiply scores and weights in float32, not keys and values in float16. This
        # saves one rounding.
        if key_scales is not None:
            scale_index = (page * HEADS if page_has_scale else vector) + (
                tl.zeros_like(key) if page_has_scale else key * HEADS
            )
            key_scale = tl.load(key_scales + scale_index, mask=visible, other=0.0)
            scores *= tl.expand_dims(key_scale, -2)
        scores = tl.where(tl.expand_dims(visible, -2), scores, _LEAST)
        # `most` is `_LEAST` before the first visible key. This key makes `shrink` 0, which clears
        # the sums of masked keys.
        higher = tl.maximum(most, tl.max(scores, axis=-1))
        weight = tl.exp2(scores * scale - tl.expand_dims(higher * scale, -1))
        shrink = tl.exp2((most - higher) * scale)
        total = total * shrink + tl.sum(weight, axis=-1)
        v = _widened(v, query.dtype, SPLITS)
        if value_scales is not None:
            value_scale = tl.load(value_scales + scale_index, mask=visible, other=0.0)
            weight *= tl.expand_dims(value_scale * _SCALE_UNIT, -2)
        result = result * tl.expand_dims(shrink, -1) + tl.dot(
            weight.to(query.dtype), v, input_precision="tf32x3"
        )
        most = higher

    if SPLITS > 1:
        weight = tl.exp2((most - tl.max(most, axis=0)[None, :]) * scale)
        total = tl.sum(total * weight, axis=0)
        result = tl.sum(result * weight[:, :, None], axis=0)
    # Padding, and a row that holds no block, get zeros.
    share = tl.where(query_mask, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    if value_scales is not None:
        share /= _SCALE_UNIT
    tl.store(
        out + query_index * (HEADS * DIM) + head * DIM + column,
        (share[:, None] * result).to(out.dtype.element_ty),
        mask=(frame < BLOCK_FRAMES)[:, None],
    )


def _tile(block_frames: int, heads: int, rows: int, dtype: torch.dtype) -> _Tile:
    """Returns the wide tile if its programs fill a large GPU, and a narrow tile otherwise."""
    if tiles.fills_gpu((triton.cdiv(block_frames, _WIDE.queries), heads, rows)):
        return _WIDE
    return _NARROW_FLOAT32 if dtype == torch.float32 else _NARROW


def paged_attention(
    queries: torch.Tensor,
    view: LayerView,
    cos: torch.Tensor,
    sin: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Computes attention of every block to the keys and values in its pages. The keys and values of
    the block itself must be stored before, as `project_heads` does.

    Args:
        queries: (branches * blocks, block_frames, width), contiguous. The first heads * dim_head
            channels are the queries, so the result of a joined projection can be passed as it is.
        view, cos, sin, table: see `project_heads`.

    Returns:
        (branches * blocks, block_frames, heads * dim_head). Padding frames are zero.
    """
    assert queries.is_contiguous()
    pages, block_frames, heads, dim_head = view.data.shape[2:]
    rows = len(queries)
    out = queries.new_empty(rows, block_frames, heads * dim_head)
    tile = _tile(block_frames, heads, rows, queries.dtype)
    frames_up = max(_NARROWEST, triton.next_power_of_2(block_frames))
    tile_queries = min(tile.queries, frames_up)
    grid = triton.cdiv(block_frames, tile_queries), heads, rows
    _paged_attention[grid](
        queries,
        out,
        *view.parts,
        cos,
        sin,
        *rows_of(table),
        pages,
        _LOG2_E / math.sqrt(dim_head),
        QUERY_WIDTH=queries.shape[-1],
        QUERIES=tile_queries,
        KEYS=frames_up,
        SPLITS=tile.splits,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **sizes_of(view),
        **launch_options(),
    )
    return out
