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

_INT8_MAX = tl.constexpr(127.0)  # the same as in cache/paged_kv_cache.py


@triton.jit
def widths_of(most):
    """Returns the steps of int8 for vectors with these largest numbers."""
    return tl.maximum(most, 1e-12) / _INT8_MAX


@triton.jit
def _stored(values, data, scales, at, head, column, inside, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Writes the vectors (heads, dim) of a frame to position `at`, counted in frames."""
    if scales is not None:
        widths = widths_of(tl.max(tl.abs(values), axis=1))
        tl.store(scales + at * HEADS + head, widths, mask=head < HEADS)
        values = tl.floor(values / widths[:, None] + 0.5)
    offsets = at * HEADS * DIM + head[:, None] * DIM + column[None, :]
    tl.store(data + offsets, values.to(data.dtype.element_ty), mask=inside)


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
    HEADS_UP: tl.constexpr,
    DIM: tl.constexpr,
):
    frame, row = tl.program_id(0), tl.program_id(1)
    block, branch = row % blocks, row // blocks
    own = table + block * width
    if frame < tl.load(own + VALID):
        page = tl.load(own + HEADER + tl.load(own + NUM_CAUSAL_PAGES) - 1).to(tl.int64)
        at = (branch * pages + page) * BLOCK_FRAMES + frame

        head, column = tl.arange(0, HEADS_UP), tl.arange(0, DIM)
        inside = (head < HEADS)[:, None]
        inner = HEADS * DIM
        first = qkv + (row * BLOCK_FRAMES + frame).to(tl.int64) * 3 * inner
        offsets = head[:, None] * DIM + column[None, :]
        key = tl.load(first + inner + offsets, mask=inside, other=0.0).to(tl.float32)
        # Interleaved pairs: the index of the other one of a pair differs in the last bit.
        other = tl.load(first + inner + (offsets ^ 1), mask=inside, other=0.0).to(tl.float32)
        turned = tl.where(column[None, :] % 2 == 0, -other, other)
        angle = (block * BLOCK_FRAMES + frame) * DIM + column
        rotated = key * tl.load(cos + angle)[None, :] + turned * tl.load(sin + angle)[None, :]
        key = tl.where(head[:, None] == 0, rotated, key)
        value = tl.load(first + 2 * inner + offsets, mask=inside, other=0.0).to(tl.float32)
        _stored(key, keys, key_scales, at, head, column, inside, HEADS, DIM)
        _stored(value, values, value_scales, at, head, column, inside, HEADS, DIM)


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
    heads_up = triton.next_power_of_2(heads)
    _store_keys_values[(block_frames, len(qkv))](
        qkv, *view.parts, cos, sin, *rows_of(table), pages, HEADS_UP=heads_up, **sizes_of(view)
    )
