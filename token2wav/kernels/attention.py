"""Attention of chunks over keys and values that lie in pages, each stream with a past of its own length.

Lengths and page numbers are read on the device, so one captured launch serves every history. A program takes some
frames of one head and walks over the pages that they can see with a running softmax.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from token2wav.flow.cache import LayerPages
from token2wav.kernels.chunk_table import FRAMES, HEADER, OF_A_BATCH, PAST, PREFIX, START

# Compiled for compute capability 9.0, the widest tiles of those tried with 4 warps that keep everything in registers.
_KEYS, _WARPS, _STAGES = 32, 4, 2
_QUERIES, _FEW_QUERIES = 64, 16
_ENOUGH_PROGRAMS = 128  # about as many as a large GPU has multiprocessors; below that the tiles are the narrow ones
_LEAST = tl.constexpr(-1.0e30)  # finite, so that a row that has seen nothing yet gives no NaN
_LOG2_E = 1 / math.log(2)


@triton.jit
def _loaded(data, scales, frame, row, column, visible, HEADS: tl.constexpr, DIM: tl.constexpr):
    """(keys, dim) of one head at frames of the store; zeros where nothing is visible, whatever a page holds there."""
    offsets = (frame * HEADS + row)[:, None] * DIM + column[None, :]
    values = tl.load(data + offsets, mask=visible[:, None], other=0.0)
    if scales is not None:
        widths = tl.load(scales + frame * HEADS + row, mask=visible, other=0.0)
        values = values.to(tl.float32) * widths[:, None]
    return values


@triton.jit(do_not_specialize=OF_A_BATCH)
def _paged_attention(
    qkv,  # (R, N, 3 * heads * dim)
    out,  # (R, N, heads * dim)
    keys,  # (branches, pages, block_frames, heads, dim) and so on
    values,
    key_scales,
    value_scales,
    cos,  # (streams, N, dim)
    sin,
    table,
    streams,
    frames,
    width,
    pages,  # in the store
    left_blocks,
    scale,
    BLOCK_FRAMES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    first, head, row = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    stream, branch = row % streams, row // streams
    chunk = table + stream * width
    start, valid = tl.load(chunk + START), tl.load(chunk + FRAMES)
    past, prefix = tl.load(chunk + PAST), tl.load(chunk + PREFIX)

    column = tl.arange(0, DIM)
    frame = first + tl.arange(0, QUERIES)
    asked = frame < valid
    at = (row * frames + frame).to(tl.int64)[:, None] * (3 * HEADS * DIM) + head * DIM
    query = tl.load(qkv + at + column[None, :], mask=asked[:, None], other=0.0)
    if head == 0:
        other = tl.load(qkv + at + (column ^ 1)[None, :], mask=asked[:, None], other=0.0).to(tl.float32)
        turned = tl.where(column[None, :] % 2 == 0, -other, other)
        angle = (stream * frames + frame)[:, None] * DIM + column[None, :]
        c = tl.load(cos + angle, mask=asked[:, None], other=0.0)
        s = tl.load(sin + angle, mask=asked[:, None], other=0.0)
        query = (query.to(tl.float32) * c + turned * s).to(query.dtype)

    block = (start + frame) // BLOCK_FRAMES
    most = tl.full((QUERIES,), _LEAST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, DIM), tl.float32)
    # Frames look no further than to the end of their own block, or of the chunk.
    end = tl.minimum(valid, ((first + QUERIES - 1) // BLOCK_FRAMES + 1) * BLOCK_FRAMES)
    stop = tl.where(first < valid, past * BLOCK_FRAMES + end, 0)
    for begin in range(0, stop, KEYS):
        key = begin + tl.arange(0, KEYS)
        visible = key < stop
        slot = key // BLOCK_FRAMES
        page = tl.load(chunk + HEADER + slot, mask=visible, other=0).to(tl.int64)
        key_block = tl.load(chunk + (width + HEADER) // 2 + slot, mask=visible, other=0)
        stored = (branch * pages + page) * BLOCK_FRAMES + key % BLOCK_FRAMES
        allowed = asked[:, None] & visible[None, :] & (key_block[None, :] <= block[:, None])
        if left_blocks >= 0:
            near = key_block[None, :] >= block[:, None] - left_blocks
            allowed = allowed & (near | (key_block < prefix)[None, :])

        k = _loaded(keys, key_scales, stored, head, column, visible, HEADS, DIM).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="tf32x3") * scale
        scores = tl.where(allowed, scores, _LEAST)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        weight = tl.where(allowed, tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        v = _loaded(values, value_scales, stored, head, column, visible, HEADS, DIM).to(query.dtype)
        result = result * shrink[:, None] + tl.dot(weight.to(query.dtype), v, input_precision="tf32x3")
        most = higher

    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    there = (row * frames + frame).to(tl.int64)[:, None] * (HEADS * DIM) + head * DIM + column[None, :]
    tl.store(out + there, result.to(out.dtype.element_ty), mask=(frame < frames)[:, None])


def paged_attention(
    qkv: torch.Tensor,
    pages: LayerPages,
    cos: torch.Tensor,
    sin: torch.Tensor,
    table: torch.Tensor,
    left_blocks: int,
) -> torch.Tensor:
    """Lets every frame attend to all that it can see; the chunks' own keys and values are in their pages already.

    Args:
        qkv: (R, N, 3 * heads * dim_head) projections, contiguous, of which the first third are the queries.
        pages: of the layer and step.
        cos, sin: (streams, N, dim_head) float32 rotary angles of head 0.
        table: of the batch, see `chunk_table`.
        left_blocks: blocks of the past that stay visible beside the prompt's; negative for all.

    Returns:
        (R, N, heads * dim_head), zeros in padding.
    """
    assert qkv.is_contiguous()
    rows, frames, _ = qkv.shape
    _, count, block_frames, heads, dim_head = pages.keys.shape
    out = qkv.new_empty(rows, frames, heads * dim_head)
    wide = triton.cdiv(frames, _QUERIES) * heads * rows >= _ENOUGH_PROGRAMS
    queries = _QUERIES if wide else _FEW_QUERIES
    _paged_attention[(triton.cdiv(frames, queries), heads, rows)](
        qkv,
        out,
        pages.keys,
        pages.values,
        pages.key_scales,
        pages.value_scales,
        cos,
        sin,
        table,
        len(table),
        frames,
        table.shape[1],
        count,
        left_blocks,
        _LOG2_E / math.sqrt(dim_head),
        BLOCK_FRAMES=block_frames,
        HEADS=heads,
        DIM=dim_head,
        QUERIES=queries,
        KEYS=_KEYS,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
