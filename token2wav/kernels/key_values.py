"""Storing of the keys and values of blocks in their own pages.

They go straight from the projection into a page: rotated, and rounded to the storage type.
"""

from __future__ import annotations

import triton
import triton.language as tl

# the same as in cache/paged_kv_cache.py
_INT8_MAX, _FLOAT8_MAX = tl.constexpr(127.0), tl.constexpr(448.0)


@triton.jit
def store_vectors(
    vectors,  # (FRAMES, HEADS_OF_TILE * DIM) in float32
    data,  # (branches * pages, BLOCK_FRAMES, HEADS, DIM)
    scales,
    page,  # (FRAMES,) of each frame, counted over the branches
    frame,  # (FRAMES,) in the page
    first_head,
    frame_mask,  # whether to store a frame
    BLOCK_FRAMES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FRAMES: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
):
    """Writes the keys or values of some heads, rounded to the storage type.

    For float8, all frames of a tile belong to one page, because the frames share the scales.
    """
    at = page * BLOCK_FRAMES + frame
    output = tl.arange(0, HEADS_OF_TILE * DIM)
    if scales is not None:
        head = first_head + tl.arange(0, HEADS_OF_TILE)
        heads = tl.reshape(vectors, (FRAMES, HEADS_OF_TILE, DIM))
        most = tl.maximum(tl.max(tl.abs(heads), axis=2), 1e-12)
        if data.dtype.element_ty == tl.float8e4nv:
            # Frames that are not stored may be NaN.
            widths = tl.max(tl.where(frame_mask[:, None], most, 1e-12), axis=0) / _FLOAT8_MAX
            tile_page = tl.max(tl.where(frame_mask, page, 0), axis=0)
            some = tl.max(frame_mask.to(tl.int32), axis=0) > 0
            tl.store(scales + tile_page * HEADS + head, widths, mask=(head < HEADS) & some)
            heads = heads / widths[None, :, None]
        else:
            widths = most / _INT8_MAX
            tl.store(scales + at[:, None] * HEADS + head[None, :], widths, mask=frame_mask[:, None])
            heads = tl.floor(heads / widths[:, :, None] + 0.5)
        vectors = tl.reshape(heads, (FRAMES, HEADS_OF_TILE * DIM))
    offset = at[:, None] * (HEADS * DIM) + first_head * DIM + output[None, :]
    tl.store(data + offset, vectors.to(data.dtype.element_ty), mask=frame_mask[:, None])
