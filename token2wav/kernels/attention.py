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
    NUM_CAUSAL_PAGES,
    NUM_PAGES,
    OF_A_BATCH,
    PROMPT_PADDING,
    SHARED_PAGES,
    VALID,
    rows_of,
    sizes_of,
    tile_of_keys,
)

_LEAST = tl.constexpr(-1.0e30)  # finite, so that a row without keys so far gives no NaN
_LOG2_E = 1 / math.log(2)


class _Tile(NamedTuple):
    """Tile of a program.

    Attributes:
        keys: keys of an iteration, for each split.
        splits: parts of the keys of an iteration, which different warps compute.
        halved: whether half of the tile is computed where a chunk has no more frames.
    """

    queries: int
    keys: int
    splits: int
    warps: int
    halved: bool = False


# Tiles that keep everything in registers, compiled for compute capabilities 8.0, 9.0 and 10.0. A
# tile of 128 queries reads the past of two and a half blocks of 50 frames once.
_WIDEST = _Tile(queries=128, keys=64, splits=1, warps=8, halved=True)
_WIDE = _Tile(queries=64, keys=64, splits=1, warps=4)
_NARROW = _Tile(queries=16, keys=32, splits=4, warps=4)
_STAGES = 2  # iterations whose loads are in flight


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):
    """Loads keys, values or scales. Unless all are `WHOLE`, they are zeros outside of the mask,
    because a page may hold any value there.
    """
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _add_keys(
    most,
    total,
    result,
    query,
    hidden,  # positions in the list of keys: a query attends to no key from `shared` up to here,
    stop,  # and to no key from here on
    begin,
    shared,
    end,
    header,
    width,
    branch_pages,
    head,
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
    """Adds the keys of one iteration to the running softmax, which has maxima, sums and results. If
    the keys are `WHOLE`, every query attends to all of them.
    """
    # If not all keys are whole, the list may go on with the own pages of the rows below.
    key, page = tile_of_keys(begin, end, header, width, KEYS, SPLITS, BLOCK_FRAMES, not WHOLE)
    key_mask = key < end
    # Vector of the head at a frame of the store, the elements of the vector, and its scale.
    page += branch_pages
    vector = (page * BLOCK_FRAMES + key % BLOCK_FRAMES) * HEADS + head
    scaled = page * HEADS + head if keys.dtype.element_ty == tl.float8e4nv else vector
    elements = tl.expand_dims(vector, -1) * DIM + tl.arange(0, DIM)
    element_mask = tl.expand_dims(key_mask, -1)

    k = _load(keys + elements, element_mask, WHOLE).to(query.dtype)
    k = tl.permute(k, (0, 2, 1)) if SPLITS > 1 else tl.trans(k)
    scores = tl.dot(query, k, input_precision="tf32x3") * scale
    if key_scales is not None:
        scores *= tl.expand_dims(_load(key_scales + scaled, key_mask, WHOLE), -2)
    if not WHOLE:
        position = tl.expand_dims(key, -2)
        visible = (position < shared) | (position >= tl.expand_dims(hidden, -1))
        scores = tl.where(visible & (position < tl.expand_dims(stop, -1)), scores, _LEAST)
    # The first key that a query attends to makes `shrink` 0, whatever the sums were before.
    higher = tl.maximum(most, tl.max(scores, axis=-1))
    weight = tl.exp2(scores - tl.expand_dims(higher, -1))
    shrink = tl.exp2(most - higher)
    total = total * shrink + tl.sum(weight, axis=-1)

    v = _load(values + elements, element_mask, WHOLE)
    if value_scales is not None:
        vector_scales = _load(value_scales + scaled, key_mask, WHOLE)
        # Not in float32, which needs more registers than compute capability 8.0 has.
        v = v.to(query.dtype) * tl.expand_dims(vector_scales.to(query.dtype), -1)
    result = result * tl.expand_dims(shrink, -1) + tl.dot(
        weight.to(query.dtype), v.to(query.dtype), input_precision="tf32x3"
    )
    return higher, total, result


@triton.jit
def _attend(
    queries,
    out,
    keys,
    values,
    key_scales,
    value_scales,
    cos,
    sin,
    table,
    blocks,
    width,
    pages,
    scale,
    first,  # of the tile, a frame of its chunk
    BLOCK_FRAMES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Computes a tile of queries."""
    head, row = tl.program_id(1), tl.program_id(2)
    block, branch = row % blocks, row // blocks
    top = block - tl.load(table + block * width + BEFORE) // BLOCK_FRAMES  # first row of the chunk

    # The frames of a chunk follow each other, over the borders of its blocks.
    chunk_frame = first + tl.arange(0, QUERIES)
    line, frame = top + chunk_frame // BLOCK_FRAMES, chunk_frame % BLOCK_FRAMES
    header, in_table = table + line * width, line < blocks
    valid = tl.load(header + VALID, mask=in_table, other=0)
    chunk = tl.load(header + CHUNK, mask=in_table, other=-1)
    in_chunk = (valid > 0) & (chunk == tl.load(table + block * width + CHUNK))
    query_mask = in_chunk & (frame < valid)
    query_index = ((branch * blocks + top) * BLOCK_FRAMES + chunk_frame).to(tl.int64)[:, None]

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

    # The list of keys has the pages of the first block of the tile, then the own pages of the later
    # blocks. A window that has moved on hides the pages between the shared ones and its own.
    leader = top + first // BLOCK_FRAMES
    leader_header = table + leader * width
    listed = tl.load(leader_header + NUM_CAUSAL_PAGES)
    causal = tl.load(header + NUM_CAUSAL_PAGES, mask=in_chunk, other=0)
    later = tl.load(header + NUM_PAGES, mask=in_chunk, other=0) - causal
    ahead = line - leader
    shared = tl.load(leader_header + SHARED_PAGES) * BLOCK_FRAMES
    hidden = shared + (listed - causal + ahead) * BLOCK_FRAMES
    stop = (listed - 1 + ahead + later) * BLOCK_FRAMES + valid
    end = tl.max(tl.where(query_mask, stop, 0), axis=0)

    if SPLITS > 1:
        query = tl.broadcast_to(query[None], (SPLITS, QUERIES, DIM))
        most = tl.full((SPLITS, QUERIES), _LEAST, tl.float32)
        total = tl.zeros((SPLITS, QUERIES), tl.float32)
        result = tl.zeros((SPLITS, QUERIES, DIM), tl.float32)
    else:
        most = tl.full((QUERIES,), _LEAST, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        result = tl.zeros((QUERIES, DIM), tl.float32)
    start = tl.load(leader_header + PROMPT_PADDING)
    masked = start + tl.maximum(shared - start, 0) // (SPLITS * KEYS) * (SPLITS * KEYS)
    branch_pages = branch * pages
    for begin in range(start, masked, SPLITS * KEYS):
        most, total, result = _add_keys(
            most,
            total,
            result,
            query,
            hidden,
            stop,
            begin,
            shared,
            shared,
            leader_header,
            width,
            branch_pages,
            head,
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
    for begin in range(masked, end, SPLITS * KEYS):
        most, total, result = _add_keys(
            most,
            total,
            result,
            query,
            hidden,
            stop,
            begin,
            shared,
            end,
            leader_header,
            width,
            branch_pages,
            head,
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
        weight = tl.exp2(most - tl.max(most, axis=0)[None, :])
        total = tl.sum(total * weight, axis=0)
        result = tl.sum(result * weight[:, :, None], axis=0)
    share = tl.where(query_mask, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    # A row that holds no block gets zeros too.
    out_mask = in_chunk | (line == block)
    tl.store(
        out + query_index * (HEADS * DIM) + head * DIM + column,
        (share[:, None] * result).to(out.dtype.element_ty),
        mask=out_mask[:, None],
    )


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
    HALF: tl.constexpr,  # whether a tile of few frames is computed as half a tile
):
    block = tl.program_id(2) % blocks
    # Every block brings as many programs as it needs alone. A chunk of several blocks needs fewer
    # programs than its blocks bring, so the last of them have nothing to do.
    index = tl.load(table + block * width + BEFORE) // BLOCK_FRAMES
    first = (index * tl.num_programs(0) + tl.program_id(0)) * QUERIES
    top = block - index
    if _in_chunk(top + first // BLOCK_FRAMES, block, table, blocks, width):
        middle = top + (first + QUERIES // 2) // BLOCK_FRAMES
        if HALF and not _in_chunk(middle, block, table, blocks, width):
            _attend(
                queries,
                out,
                keys,
                values,
                key_scales,
                value_scales,
                cos,
                sin,
                table,
                blocks,
                width,
                pages,
                scale,
                first,
                BLOCK_FRAMES,
                HEADS,
                DIM,
                QUERY_WIDTH,
                QUERIES // 2,
                KEYS,
                SPLITS,
            )
        else:
            _attend(
                queries,
                out,
                keys,
                values,
                key_scales,
                value_scales,
                cos,
                sin,
                table,
                blocks,
                width,
                pages,
                scale,
                first,
                BLOCK_FRAMES,
                HEADS,
                DIM,
                QUERY_WIDTH,
                QUERIES,
                KEYS,
                SPLITS,
            )


def _tile(block_frames: int, heads: int, rows: int) -> _Tile:
    """Chooses the tile: the widest that gives a large GPU enough programs."""

    def programs(tile: _Tile) -> tuple[int, int, int]:
        return triton.cdiv(block_frames, tile.queries), heads, rows

    # In the best case every second program of the widest tile has nothing to do. Two programs share
    # a multiprocessor.
    if tiles.fills_gpu((triton.cdiv(math.prod(programs(_WIDEST)), 4),)):
        return _WIDEST
    return _WIDE if tiles.fills_gpu(programs(_WIDE)) else _NARROW


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
    tile = _tile(block_frames, heads, rows)
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
        KEYS=tile.keys,
        SPLITS=tile.splits,
        HALF=tile.halved,
        num_warps=tile.warps,
        num_stages=_STAGES,
        **sizes_of(view),
    )
    return out
