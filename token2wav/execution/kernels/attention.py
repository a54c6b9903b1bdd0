"""Attention of blocks over keys and values in pages. Each block has a table of the pages that it
attends to.

Tables are read on the device, so one captured launch serves every history. One program computes
some frames of one head. It walks over the pages of their block with a running softmax.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from token2wav.cache.paged_kv_cache import LayerView
from token2wav.execution.kernels.block_table import (
    HEADER,
    NUM_PAGES,
    OF_A_BATCH,
    PROMPT_PADDING,
    VALID,
    rows_of,
    sizes_of,
)

# Of the tiles tried with 4 warps, these are the widest that keep everything in registers. They were
# compiled for compute capability 9.0.
_KEYS, _WARPS, _STAGES = 32, 4, 2
_QUERIES, _FEW_QUERIES = 64, 16
# about the number of multiprocessors of a large GPU; with fewer programs the tiles are narrow
_ENOUGH_PROGRAMS = 128
_LEAST = tl.constexpr(-1.0e30)  # finite, so that a row without keys so far gives no NaN
_LOG2_E = 1 / math.log(2)


@triton.jit
def _loaded(data, scales, frame, row, column, visible, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Loads keys or values (keys, dim) of one head at frames of the store; zeros where they are not
    visible, because a page may hold any value there.
    """
    offsets = (frame * HEADS + row)[:, None] * DIM + column[None, :]
    values = tl.load(data + offsets, mask=visible[:, None], other=0.0)
    if scales is not None:
        widths = tl.load(scales + frame * HEADS + row, mask=visible, other=0.0)
        values = values.to(tl.float32) * widths[:, None]
    return values


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
):
    first, head, row = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    block, branch = row % blocks, row // blocks
    own = table + block * width
    valid, visible_pages, start = (
        tl.load(own + VALID),
        tl.load(own + NUM_PAGES),
        tl.load(own + PROMPT_PADDING),
    )

    column = tl.arange(0, DIM)
    frame = first + tl.arange(0, QUERIES)
    asked = frame < valid
    at = (row * BLOCK_FRAMES + frame).to(tl.int64)[:, None] * QUERY_WIDTH + head * DIM
    query = tl.load(queries + at + column[None, :], mask=asked[:, None], other=0.0)
    if head == 0:
        other = tl.load(queries + at + (column ^ 1)[None, :], mask=asked[:, None], other=0.0).to(
            tl.float32
        )
        turned = tl.where(column[None, :] % 2 == 0, -other, other)
        angle = (block * BLOCK_FRAMES + frame)[:, None] * DIM + column[None, :]
        c = tl.load(cos + angle, mask=asked[:, None], other=0.0)
        s = tl.load(sin + angle, mask=asked[:, None], other=0.0)
        query = (query.to(tl.float32) * c + turned * s).to(query.dtype)

    most = tl.full((QUERIES,), _LEAST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, DIM), tl.float32)
    # All frames of a block attend to the same keys: from the first frame after the prompt padding
    # to the valid frames of the last page. Under full prompt attention all pages are full.
    stop = tl.where(first < valid, (visible_pages - 1) * BLOCK_FRAMES + valid, 0)
    for begin in range(start, stop, KEYS):
        key = begin + tl.arange(0, KEYS)
        visible = key < stop
        page = tl.load(own + HEADER + key // BLOCK_FRAMES, mask=visible, other=0).to(tl.int64)
        stored = (branch * pages + page) * BLOCK_FRAMES + key % BLOCK_FRAMES

        k = _loaded(keys, key_scales, stored, head, column, visible, HEADS, DIM).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="tf32x3") * scale
        scores = tl.where(visible[None, :], scores, _LEAST)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        # 0 where a key is not visible, because the first keys are always visible
        weight = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        v = _loaded(values, value_scales, stored, head, column, visible, HEADS, DIM).to(query.dtype)
        result = result * shrink[:, None] + tl.dot(
            weight.to(query.dtype), v, input_precision="tf32x3"
        )
        most = higher

    result = tl.where(asked, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)[:, None] * result
    there = (
        (row * BLOCK_FRAMES + frame).to(tl.int64)[:, None] * (HEADS * DIM)
        + head * DIM
        + column[None, :]
    )
    tl.store(out + there, result.to(out.dtype.element_ty), mask=(frame < BLOCK_FRAMES)[:, None])


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
        view, cos, sin, table: see `store_keys_values`.

    Returns:
        (branches * blocks, block_frames, heads * dim_head), zeros in padding.
    """
    assert queries.is_contiguous()
    pages, block_frames, heads, dim_head = view.data.shape[2:]
    rows = len(queries)
    out = queries.new_empty(rows, block_frames, heads * dim_head)
    wide = triton.cdiv(block_frames, _QUERIES) * heads * rows >= _ENOUGH_PROGRAMS
    asked = _QUERIES if wide else _FEW_QUERIES
    grid, scale = (triton.cdiv(block_frames, asked), heads, rows), _LOG2_E / math.sqrt(dim_head)
    tile = {
        "QUERY_WIDTH": queries.shape[-1],
        "QUERIES": asked,
        "KEYS": _KEYS,
        "num_warps": _WARPS,
        "num_stages": _STAGES,
    }
    _paged_attention[grid](
        queries, out, *view.parts, cos, sin, *rows_of(table), pages, scale, **sizes_of(view), **tile
    )
    return out
