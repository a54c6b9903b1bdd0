"""Storing of the keys and values of blocks in their own pages.

They go straight from the projection into a page: rotated, and rounded to the storage type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.cache.paged_kv_cache import LayerView
from token2wav.execution.kernels.block_table import (
    HEADER,
    NUM_CAUSAL_PAGES,
    OF_A_BATCH,
    VALID,
    rows_of,
    sizes_of,
)

# the same as in cache/paged_kv_cache.py
_INT8_MAX, _FLOAT8_MAX = tl.constexpr(127.0), tl.constexpr(448.0)
_WARPS = 4


@triton.jit
def store_vectors(
    vectors,  # (FRAMES, HEADS_OF_TILE * DIM) in float32
    data,  # (branches * pages, BLOCK_FRAMES, HEADS, DIM)
    scales,
    page,  # (FRAMES,) of each frame, counted over the branches
    frame,  # (FRAMES,) in the page
    first_head,
    there,  # whether to store a frame
    BLOCK_FRAMES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FRAMES: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
):
    """Writes the keys or values of some heads, rounded to the storage type.

    The frames of a tile for float8 are those of one page, because they share the scales.
    """
    at = page * BLOCK_FRAMES + frame
    output = tl.arange(0, HEADS_OF_TILE * DIM)
    if scales is not None:
        head = first_head + tl.arange(0, HEADS_OF_TILE)
        heads = tl.reshape(vectors, (FRAMES, HEADS_OF_TILE, DIM))
        most = tl.maximum(tl.max(tl.abs(heads), axis=2), 1e-12)
        if data.dtype.element_ty == tl.float8e4nv:
            # Frames that are not stored may be NaN.
            widths = tl.max(tl.where(there[:, None], most, 1e-12), axis=0) / _FLOAT8_MAX
            tile_page = tl.max(tl.where(there, page, 0), axis=0)
            some = tl.max(there.to(tl.int32), axis=0) > 0
            tl.store(scales + tile_page * HEADS + head, widths, mask=(head < HEADS) & some)
            heads = heads / widths[None, :, None]
        else:
            widths = most / _INT8_MAX
            tl.store(scales + at[:, None] * HEADS + head[None, :], widths, mask=there[:, None])
            heads = tl.floor(heads / widths[:, :, None] + 0.5)
        vectors = tl.reshape(heads, (FRAMES, HEADS_OF_TILE * DIM))
    place = at[:, None] * (HEADS * DIM) + first_head * DIM + output[None, :]
    tl.store(data + place, vectors.to(data.dtype.element_ty), mask=there[:, None])


@triton.jit(do_not_specialize=OF_A_BATCH)
def _store_keys_values(
    qkv,  # (branches * blocks, BLOCK_FRAMES, 3 * heads * dim)
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
    BLOCK_FRAMES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FRAMES: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    block, branch = row % blocks, row // blocks
    own = table + block * width
    valid = tl.load(own + VALID)
    if valid > 0:
        last = tl.load(own + NUM_CAUSAL_PAGES) - 1
        frame, column = tl.arange(0, FRAMES), tl.arange(0, DIM)[None, :]
        there = frame < valid
        known = there[:, None]
        page = tl.zeros_like(frame) + branch * pages + tl.load(own + HEADER + last)

        at = (row * BLOCK_FRAMES + frame).to(tl.int64)[:, None] * (3 * HEADS * DIM)
        first = qkv + at + (HEADS + head) * DIM
        key = tl.load(first + column, mask=known, other=0.0).to(tl.float32)
        if head == 0:
            # Interleaved pairs: the index of the other one of a pair differs in the last bit.
            other = tl.load(first + (column ^ 1), mask=known, other=0.0).to(tl.float32)
            turned = tl.where(column % 2 == 0, -other, other)
            angle = (block * BLOCK_FRAMES + frame)[:, None] * DIM + column
            c = tl.load(cos + angle, mask=known, other=0.0)
            s = tl.load(sin + angle, mask=known, other=0.0)
            key = key * c + turned * s
        value = tl.load(first + HEADS * DIM + column, mask=known, other=0.0).to(tl.float32)
        page = page.to(tl.int64)
        store_vectors(
            key, keys, key_scales, page, frame, head, there, BLOCK_FRAMES, HEADS, DIM, FRAMES, 1
        )
        store_vectors(
            value,
            values,
            value_scales,
            page,
            frame,
            head,
            there,
            BLOCK_FRAMES,
            HEADS,
            DIM,
            FRAMES,
            1,
        )


def store_keys_values(
    qkv: torch.Tensor, view: LayerView, cos: torch.Tensor, sin: torch.Tensor, table: torch.Tensor
) -> None:
    """Stores the keys and values of the valid frames of every block in its own page. Head 0 of the
    keys is rotated.

    Args:
        qkv: (branches * blocks, block_frames, 3 * heads * dim_head) projections, contiguous; rows
            are branch by branch.
        view: view of a layer of the cache.
        cos, sin: (blocks, block_frames, dim_head) float32 rotary angles of head 0.
        table: block table of the batch, see `execution/batch.py`.
    """
    assert qkv.is_contiguous()
    pages, block_frames, heads = view.data.shape[2:5]
    _store_keys_values[(heads, len(qkv))](
        qkv,
        *view.parts,
        cos,
        sin,
        *rows_of(table),
        pages,
        FRAMES=triton.next_power_of_2(block_frames),
        num_warps=_WARPS,
        **sizes_of(view),
    )
