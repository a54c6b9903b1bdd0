"""Keys and values of a chunk from the projection straight into their pages: rotated, rounded to the storage type."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.flow.cache import LayerPages
from token2wav.kernels.chunk_table import FRAMES, HEADER, OF_A_BATCH, PAST

_INT8_MAX = tl.constexpr(127.0)  # as flow/cache.py


@triton.jit
def _stored(values, data, scales, at, head, column, inside, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Writes the vectors (heads, dim) of a frame to `at`, counted in frames."""
    if scales is not None:
        widths = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12) / _INT8_MAX
        tl.store(scales + at * HEADS + head, widths, mask=head < HEADS)
        values = tl.floor(values / widths[:, None] + 0.5)
    offsets = at * HEADS * DIM + head[:, None] * DIM + column[None, :]
    tl.store(data + offsets, values.to(data.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=OF_A_BATCH)
def _store_keys_values(
    qkv,  # (R, N, 3 * heads * dim)
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
    BLOCK_FRAMES: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_UP: tl.constexpr,
    DIM: tl.constexpr,
):
    frame, row = tl.program_id(0), tl.program_id(1)
    stream, branch = row % streams, row // streams
    chunk = table + stream * width
    valid = tl.load(chunk + FRAMES)
    # The rest of a last block that is not full is written, too: with zeros, for pages keep what others left in them.
    if frame < tl.cdiv(valid, BLOCK_FRAMES) * BLOCK_FRAMES:
        slot = tl.load(chunk + PAST) + frame // BLOCK_FRAMES
        page = tl.load(chunk + HEADER + slot).to(tl.int64)
        at = (branch * pages + page) * BLOCK_FRAMES + frame % BLOCK_FRAMES

        head, column = tl.arange(0, HEADS_UP), tl.arange(0, DIM)
        inside = (head < HEADS)[:, None]
        here = (head < tl.where(frame < valid, HEADS, 0))[:, None]
        inner = HEADS * DIM
        first = qkv + (row * frames + frame).to(tl.int64) * 3 * inner
        offsets = head[:, None] * DIM + column[None, :]
        key = tl.load(first + inner + offsets, mask=here, other=0.0).to(tl.float32)
        # Interleaved pairs: the other one of a pair has the same number but for the last bit.
        other = tl.load(first + inner + (offsets ^ 1), mask=here, other=0.0).to(tl.float32)
        turned = tl.where(column[None, :] % 2 == 0, -other, other)
        angle = (stream * frames + frame) * DIM + column
        rotated = key * tl.load(cos + angle)[None, :] + turned * tl.load(sin + angle)[None, :]
        key = tl.where(head[:, None] == 0, rotated, key)
        value = tl.load(first + 2 * inner + offsets, mask=here, other=0.0).to(tl.float32)
        _stored(key, keys, key_scales, at, head, column, inside, HEADS, DIM)
        _stored(value, values, value_scales, at, head, column, inside, HEADS, DIM)


def store_keys_values(
    qkv: torch.Tensor, pages: LayerPages, cos: torch.Tensor, sin: torch.Tensor, table: torch.Tensor
) -> None:
    """Stores the keys, of which head 0 is rotated, and the values of every stream's chunk in its own pages.

    Args:
        qkv: (R, N, 3 * heads * dim_head) projections, contiguous; rows are branch by branch.
        pages: of the layer and step.
        cos, sin: (streams, N, dim_head) float32 rotary angles.
        table: of the batch, see `chunk_table`.
    """
    assert qkv.is_contiguous()
    rows, frames, _ = qkv.shape
    _, count, block_frames, heads, dim_head = pages.keys.shape
    _store_keys_values[(frames, rows)](
        qkv,
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
        BLOCK_FRAMES=block_frames,
        HEADS=heads,
        HEADS_UP=triton.next_power_of_2(heads),
        DIM=dim_head,
    )
