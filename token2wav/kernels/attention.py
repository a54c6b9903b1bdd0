"""Attention of chunks over keys and values in pages. Each block of a chunk has a table of the pages
that it attends to.

Tables are read on the device, so one captured launch serves every history. One program computes a
tile of queries of one head with a running softmax. The tile may hold frames of several blocks of a
chunk, because the blocks share their past. The program then reads the past once for these blocks.
It walks over a list of pages: the pages of its first block, then the own pages of the later blocks.
Keys that every block of the chunk attends to need no mask.

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
    BEFORE,
    CHUNK,
    HEADER,
    NUM_CAUSAL_PAGES,
    NUM_PAGES,
    OF_A_BATCH,
    PROMPT_PADDING,
    SHARED_PAGES,
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


# On an H200 these tiles were the fastest of eleven. A wide tile of 128 queries takes 1.1 to 2.3
# times as long, because its registers leave room for one program on a multiprocessor. In float16
# both tiles keep everything in registers, compiled for compute capabilities 8.0, 9.0 and 10.0.
_WIDE = _Tile(queries=64, splits=1, warps=4, stages=3)
_NARROW = _Tile(queries=16, splits=4, warps=4, stages=2)
_NARROW_FLOAT32 = _NARROW._replace(splits=2)  # four pages do not fit the memory of a small GPU
# On compute capability 8.x the conversion of int8 pages needs more registers than there are. These
# tiles spill none there, compiled by Triton 3.6 and 3.7. No GPU has timed them.
_WIDE_INT8_8X = _Tile(queries=64, splits=1, warps=8, stages=2)
_NARROW_INT8_8X = _Tile(queries=16, splits=2, warps=8, stages=1)
_NARROWEST = 16  # smallest matrix of the tensor cores; smaller pages are padded


@triton.jit
def _pages(header, width, index, until, BELOW: tl.constexpr):
    """Returns the pages at places of the list; 0 from the place `until` on.

    The list begins with the pages of the table row at `header`. If `BELOW`, it goes on with the own
    pages of the rows below.
    """
    in_list = index < until
    entry = header + HEADER + index
    if BELOW:
        below = index - tl.load(header + NUM_PAGES) + 1
        row = header + below * width
        own_page = tl.load(row + NUM_CAUSAL_PAGES, mask=in_list & (below > 0), other=1) - 1
        entry = tl.where(below > 0, row + HEADER + own_page, entry)
    return tl.load(entry, mask=in_list, other=0).to(tl.int64)


@triton.jit
def _add_pages(
    most,
    total,
    result,
    query,
    page,  # () or (SPLITS,)
    index,  # places of the pages in the list
    start,  # positions in the list of keys: a query attends to no key before `start`,
    shared,  # to no key from `shared` up to `hidden`,
    hidden,  # (QUERIES,)
    stop,  # (QUERIES,) and to no key from here on
    end,  # no query attends to a key from here on
    keys,
    values,
    key_scales,
    value_scales,
    scale,
    BLOCK_FRAMES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Adds a page, or a page for each split, to the running softmax, which has maxima, sums and
    results. If the pages are `WHOLE`, every query attends to all of their keys.
    """
    frame = tl.arange(0, KEYS)
    inside = frame < BLOCK_FRAMES
    if SPLITS > 1:
        frame, inside = frame[None, :], tl.broadcast_to(inside[None, :], (SPLITS, KEYS))
        page, index = page[:, None], index[:, None]
    position = index * BLOCK_FRAMES + frame
    # Zeros where no query attends to a key, because a page may hold any value there.
    loaded = inside if WHOLE else inside & (position >= start) & (position < end)
    vector = page * (BLOCK_FRAMES * HEADS)  # the first one of the page and the head
    first, elements = vector * DIM, tl.expand_dims(frame * (HEADS * DIM), -1) + tl.arange(0, DIM)
    first = tl.expand_dims(first, -1) if SPLITS > 1 else first
    element_mask = tl.expand_dims(loaded, -1)

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
            tl.zeros_like(frame) if one else frame * HEADS
        )
        scores *= tl.expand_dims(tl.load(key_scales + scaled, mask=loaded, other=0.0), -2)
    visible = tl.expand_dims(loaded, -2)
    if not WHOLE:
        at = tl.expand_dims(position, -2)
        visible = visible & ((at < shared) | (at >= tl.expand_dims(hidden, -1)))
        visible = visible & (at < tl.expand_dims(stop, -1))
    if not WHOLE or KEYS > BLOCK_FRAMES:
        scores = tl.where(visible, scores, _LEAST)
    # The first key that a query attends to makes `shrink` 0, whatever the sums were before.
    higher = tl.maximum(most, tl.max(scores, axis=-1))
    weight = tl.exp2(scores * scale - tl.expand_dims(higher * scale, -1))
    shrink = tl.exp2((most - higher) * scale)
    total = total * shrink + tl.sum(weight, axis=-1)

    v = _widened(v, query.dtype, SPLITS)
    if value_scales is not None:
        value_scale = tl.load(value_scales + scaled, mask=loaded, other=0.0) * _SCALE_UNIT
        weight *= tl.expand_dims(value_scale, -2)
    result = result * tl.expand_dims(shrink, -1) + tl.dot(
        weight.to(query.dtype), v, input_precision="tf32x3"
    )
    return higher, total, result


@triton.jit
def _widened(x, dtype: tl.constexpr, SPLITS: tl.constexpr):
    """Converts stored numbers to the dtype of the queries."""
    if x.dtype == tl.int8 and dtype == tl.float16 and SPLITS == 1:
        # The instruction that converts a number takes 8 cycles. This takes 3: 0x6400 plus a number
        # from 0 to 255 are the bits of 1024 plus this number in float16. With splits it needs more
        # registers than there are.
        return (x.to(tl.int16) + 0x6480).to(tl.float16, bitcast=True) - 1152.0
    return x.to(dtype)


@triton.jit
def _in_chunk(line, block, table, blocks, width):
    """Returns whether a row of the table belongs to the chunk of a block."""
    in_table = line < blocks
    valid = tl.load(table + line * width + VALID, mask=in_table, other=0)
    chunk = tl.load(table + line * width + CHUNK, mask=in_table, other=-1)
    return (line == block) | ((valid > 0) & (chunk == tl.load(table + block * width + CHUNK)))


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
    # Every block brings as many programs as it needs alone. A chunk of several blocks needs fewer
    # programs than its blocks bring, so the last of them have nothing to do.
    index_in_chunk = tl.load(table + block * width + BEFORE) // BLOCK_FRAMES
    first = (index_in_chunk * tl.num_programs(0) + tl.program_id(0)) * QUERIES
    top = block - index_in_chunk  # first row of the chunk
    if _in_chunk(top + first // BLOCK_FRAMES, block, table, blocks, width):
        # The frames of a chunk follow each other, over the borders of its blocks.
        chunk_frame = first + tl.arange(0, QUERIES)
        line, frame = top + chunk_frame // BLOCK_FRAMES, chunk_frame % BLOCK_FRAMES
        header, in_table = table + line * width, line < blocks
        valid = tl.load(header + VALID, mask=in_table, other=0)
        chunk = tl.load(header + CHUNK, mask=in_table, other=-1)
        in_chunk = (valid > 0) & (chunk == tl.load(table + block * width + CHUNK))
        query_mask = in_chunk & (frame < valid)
        query_index = ((branch * blocks + top) * BLOCK_FRAMES + chunk_frame).to(tl.int64)[:, None]

        # The list of keys has the pages of the first block of the tile, then the own pages of the
        # later blocks. A window that has moved on hides the pages between the shared ones and its
        # own.
        leader = top + first // BLOCK_FRAMES
        leader_header = table + leader * width
        listed = tl.load(leader_header + NUM_CAUSAL_PAGES)
        causal = tl.load(header + NUM_CAUSAL_PAGES, mask=in_chunk, other=0)
        later = tl.load(header + NUM_PAGES, mask=in_chunk, other=0) - causal
        ahead = line - leader
        shared_pages = tl.load(leader_header + SHARED_PAGES)
        shared = shared_pages * BLOCK_FRAMES
        hidden = shared + (listed - causal + ahead) * BLOCK_FRAMES
        stop = (listed - 1 + ahead + later) * BLOCK_FRAMES + valid
        end = tl.max(tl.where(query_mask, stop, 0), axis=0)
        end_pages = (end + BLOCK_FRAMES - 1) // BLOCK_FRAMES
        start = tl.load(leader_header + PROMPT_PADDING)

        split = tl.arange(0, SPLITS) if SPLITS > 1 else 0
        # First the pages that need no mask. Before them is the page with padding of the prompt.
        first_whole = (start > 0).to(tl.int32)
        whole_end = first_whole + tl.maximum(shared_pages - first_whole, 0) // SPLITS * SPLITS
        # The number of a page is read one iteration ahead, because loads of its keys depend on it.
        following = _pages(leader_header, width, first_whole + split, whole_end, False)
        # Then all others: the page with padding, and the pages from `whole_end` on. A short past
        # has no other pages, so their numbers are read before the queries too.
        skipped = whole_end - first_whole
        index = split + tl.where(split < first_whole, 0, skipped)
        following_rest = _pages(leader_header, width, index, end_pages, True)
        wait_for_earlier_kernel()
        column = tl.arange(0, DIM)[None, :]
        query_pointers = queries + query_index * QUERY_WIDTH + head * DIM
        query = tl.load(query_pointers + column, mask=query_mask[:, None], other=0.0)
        if head == 0:
            partner = tl.load(query_pointers + (column ^ 1), mask=query_mask[:, None], other=0.0)
            partner = partner.to(tl.float32)
            rotated = tl.where(column % 2 == 0, -partner, partner)
            angle = (top * BLOCK_FRAMES + chunk_frame)[:, None] * DIM + column
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

        for entry in range(first_whole, whole_end, SPLITS):
            page = following
            following = _pages(leader_header, width, entry + SPLITS + split, whole_end, False)
            most, total, result = _add_pages(
                most,
                total,
                result,
                query,
                page,
                entry + split,
                start,
                shared,
                hidden,
                stop,
                end,
                keys,
                values,
                key_scales,
                value_scales,
                scale,
                BLOCK_FRAMES,
                HEADS,
                DIM,
                KEYS,
                SPLITS,
                True,
            )
        following = following_rest
        for entry in range(0, end_pages - skipped, SPLITS):
            page, current = following, index
            index = entry + SPLITS + skipped + split
            following = _pages(leader_header, width, index, end_pages, True)
            most, total, result = _add_pages(
                most,
                total,
                result,
                query,
                page,
                current,
                start,
                shared,
                hidden,
                stop,
                end,
                keys,
                values,
                key_scales,
                value_scales,
                scale,
                BLOCK_FRAMES,
                HEADS,
                DIM,
                KEYS,
                SPLITS,
                False,
            )

        if SPLITS > 1:
            weight = tl.exp2((most - tl.max(most, axis=0)[None, :]) * scale)
            total = tl.sum(total * weight, axis=0)
            result = tl.sum(result * weight[:, :, None], axis=0)
        share = tl.where(query_mask, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
        if value_scales is not None:
            share /= _SCALE_UNIT
        # A row that holds no block gets zeros too.
        out_mask = in_chunk | (line == block)
        tl.store(
            out + query_index * (HEADS * DIM) + head * DIM + column,
            (share[:, None] * result).to(out.dtype.element_ty),
            mask=out_mask[:, None],
        )


def _tile(
    block_frames: int,
    heads: int,
    rows: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    capability: int,
) -> _Tile:
    """Chooses the wide tile if it gives a large GPU enough programs.

    Args:
        stored: dtype of keys and values in pages.
        capability: first number of the compute capability.
    """
    int8_8x = (dtype, stored, capability) == (torch.float16, torch.int8, 8)
    if tiles.fills_gpu((triton.cdiv(block_frames, _WIDE.queries), heads, rows)):
        return _WIDE_INT8_8X if int8_8x else _WIDE
    if dtype == torch.float32:
        return _NARROW_FLOAT32
    return _NARROW_INT8_8X if int8_8x else _NARROW


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
    capability = tiles.limits(queries.device).capability
    tile = _tile(block_frames, heads, rows, queries.dtype, view.data.dtype, capability)
    grid = triton.cdiv(block_frames, tile.queries), heads, rows
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
        QUERIES=tile.queries,
        KEYS=max(_NARROWEST, triton.next_power_of_2(block_frames)),
        SPLITS=tile.splits,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **sizes_of(view),
        **launch_options(),
    )
    return out
