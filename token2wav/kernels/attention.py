"""Attention of blocks over keys and values in pages. Each block has a row of a table with the pages
that it attends to, in order.

Tables are read on the device, so one captured launch serves every history. One program computes a
tile of queries of one head and block with a running softmax. All queries of a block attend to the
same keys: from the first one after the padding of the prompt to the valid ones of the last page.

A small batch has too few tiles for a GPU. There the warps of a program compute different keys for
the same few queries, and the program joins their results at the end. So a long history is split
without a second launch and without atomic operations.
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

# Score of a key that a query does not attend to. It is finite, so that a row without keys so far
# gives no NaN. It is a power of two, so that its product with any scale is exact: a GPU computes
# `scores * scale - higher * scale` as one fused operation, which rounds the second product alone.
# With -1e30 the difference of two equal numbers was up to 1e22, and its power of two was infinite.
_LEAST = tl.constexpr(-(2.0**100))
# Factor of the weights times the scales of values, so that float16 holds small ones with all of its
# bits: a scale is at most a 127th of the largest value.
_SCALE_UNIT = tl.constexpr(128.0)
_LOG2_E = 1 / math.log(2)


class _Tile(NamedTuple):
    """Tile of a program."""

    queries: int
    splits: int  # pages of an iteration, which different warps compute
    warps: int
    stages: int  # iterations whose loads are in flight


# On an H200 these tiles were the fastest of eleven, in an earlier form of this kernel. A wide tile
# of 128 queries took 1.1 to 2.3 times as long, because its registers leave room for one program on
# a multiprocessor. Both tiles keep everything in registers, compiled for compute capabilities 8.0,
# 9.0 and 10.0.
_WIDE = _Tile(queries=64, splits=1, warps=4, stages=3)
_NARROW = _Tile(queries=16, splits=4, warps=4, stages=2)
_NARROW_FLOAT32 = _NARROW._replace(splits=2)  # four pages do not fit the memory of a small GPU
_NARROWEST = 16  # smallest matrix of the tensor cores; smaller pages are padded


@triton.jit
def _widened(x, dtype: tl.constexpr, SPLITS: tl.constexpr):
    """Converts stored numbers to the dtype of the queries."""
    if x.dtype == tl.int8 and dtype == tl.float16 and SPLITS == 1:
        # The instruction that converts a number takes 8 cycles. This takes 3: 0x6400 plus a number
        # from 0 to 255 are the bits of 1024 plus this number in float16. With splits it needs more
        # registers than there are.
        return (x.to(tl.int16) + 0x6480).to(tl.float16, bitcast=True) - 1152.0
    return x.to(dtype)


@triton.jit(do_not_specialize=OF_A_BATCH)
def _paged_attention(
    queries,  # (branches * blocks, BLOCK_FRAMES, QUERY_WIDTH): the first heads * dim are queries
    out,  # (branches * blocks, BLOCK_FRAMES, heads * dim)
    keys,  # (branches, pages, BLOCK_FRAMES, heads, dim) and so on
    values,
    key_scales,
    value_scales,
    cos,  # (blocks, BLOCK_FRAMES, dim)
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
    # The reads of the table do not depend on each other, and come before the wait.
    header = table + block * width
    valid, count = tl.load(header + VALID), tl.load(header + NUM_PAGES)
    start = tl.load(header + PROMPT_PADDING)
    split = tl.arange(0, SPLITS) if SPLITS > 1 else 0
    following = tl.load(header + HEADER + split, mask=split < width - HEADER, other=0)
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
    head_vector = branch.to(tl.int64) * pages * (BLOCK_FRAMES * HEADS) + head
    keys += head_vector * DIM
    values += head_vector * DIM
    if key_scales is not None:
        is_paged = keys.dtype.element_ty == tl.float8e4nv
        head_scale = branch.to(tl.int64) * pages * HEADS + head if is_paged else head_vector
        key_scales += head_scale
        value_scales += head_scale

    # Keys of a page, one after the other; the tile is wider than the page.
    key = tl.arange(0, KEYS)
    in_page = key < BLOCK_FRAMES
    if SPLITS > 1:
        key, in_page = key[None, :], tl.broadcast_to(in_page[None, :], (SPLITS, KEYS))
    end = (count - 1) * BLOCK_FRAMES + valid
    for entry in range(0, count, SPLITS):
        index = entry + split
        page = tl.where(index < count, following, 0).to(tl.int64)
        # The number of a page is read one iteration ahead, because loads of its keys depend on it.
        following = tl.load(header + HEADER + index + SPLITS, mask=index + SPLITS < count, other=0)
        if SPLITS > 1:
            page, index = tl.expand_dims(page, 1), tl.expand_dims(index, 1)
        position = index * BLOCK_FRAMES + key
        # Zeros at keys that the block does not attend to, because a page may hold any value there.
        visible = in_page & (position >= start) & (position < end)
        vector = page * (BLOCK_FRAMES * HEADS)  # the first one of the page and the head
        first = tl.expand_dims(vector * DIM, -1) if SPLITS > 1 else vector * DIM
        elements = tl.expand_dims(key * (HEADS * DIM), -1) + tl.arange(0, DIM)
        element_mask = tl.expand_dims(visible, -1)
        k = tl.load((keys + first) + elements, mask=element_mask, other=0.0)
        v = tl.load((values + first) + elements, mask=element_mask, other=0.0)
        k = _widened(k, query.dtype, SPLITS)
        k = tl.permute(k, (0, 2, 1)) if SPLITS > 1 else tl.trans(k)
        scores = tl.dot(query, k, input_precision="tf32x3")
        # Scales belong to keys, so scores and weights are multiplied in float32, not the keys and
        # values in float16: as many products, and one rounding less.
        if key_scales is not None:
            one = keys.dtype.element_ty == tl.float8e4nv  # scale for the page and the head
            scaled = (page * HEADS if one else vector) + (
                tl.zeros_like(key) if one else key * HEADS
            )
            scores *= tl.expand_dims(tl.load(key_scales + scaled, mask=visible, other=0.0), -2)
        scores = tl.where(tl.expand_dims(visible, -2), scores, _LEAST)
        # The first key that a query attends to makes `shrink` 0, whatever the sums were before.
        higher = tl.maximum(most, tl.max(scores, axis=-1))
        weight = tl.exp2(scores * scale - tl.expand_dims(higher * scale, -1))
        shrink = tl.exp2((most - higher) * scale)
        total = total * shrink + tl.sum(weight, axis=-1)
        v = _widened(v, query.dtype, SPLITS)
        if value_scales is not None:
            value_scale = tl.load(value_scales + scaled, mask=visible, other=0.0) * _SCALE_UNIT
            weight *= tl.expand_dims(value_scale, -2)
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
    """Chooses the wide tile if it gives a large GPU enough programs."""
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
    """Computes attention of every block over its pages. The keys and values of the block itself
    must be in their page already.

    Args:
        queries: (branches * blocks, block_frames, width) contiguous; the first heads * dim_head of
            the width are the queries, so that joined projections can be passed as they are.
        view, cos, sin, table: see `project_heads`.

    Returns:
        (branches * blocks, block_frames, heads * dim_head), zeros in padding.
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
