"""Rotary positions (RoPE) of the first head of queries and keys, in place in the result of the
joined projection to queries, keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE_ROWS, _WARPS = 16, 2


@triton.jit
def _pairs(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Splits values (ROWS, WIDTH) into the even and the odd columns."""
    return tl.split(tl.reshape(values, (ROWS, WIDTH // 2, 2)))


@triton.jit(do_not_specialize=("rows",))
def _rotate_first_heads(
    projected,  # (rows, WIDTH); each row begins with queries and keys of INNER channels
    cos,  # (rows, DIM), equal in each pair of channels
    sin,
    rows,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    channel = tl.arange(0, DIM_UP)[None, :]
    inside = (row < rows) & (channel < DIM)
    projected += row.to(tl.int64) * WIDTH + tl.program_id(1) * INNER
    values = tl.load(projected + channel, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + row * DIM + channel, mask=inside, other=0.0)
    s = tl.load(sin + row * DIM + channel, mask=inside, other=0.0)
    # Each pair of neighbouring channels (even, odd) is rotated by one angle.
    even, odd = _pairs(values, TILE_ROWS, DIM_UP)
    c, _ = _pairs(c, TILE_ROWS, DIM_UP)
    s, _ = _pairs(s, TILE_ROWS, DIM_UP)
    rotated = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (TILE_ROWS, DIM_UP))
    tl.store(projected + channel, rotated.to(projected.dtype.element_ty), mask=inside)


def rotate_first_heads(projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates head 0 of queries and keys in place, as `rotate_first_head` of networks/dit.py does.

    Args:
        projected: (..., 3 * inner), contiguous: queries, keys and values.
        cos, sin: (..., dim_head) float32, contiguous, equal in each pair of channels.
    """
    assert projected.is_contiguous()
    assert cos.is_contiguous()
    width, dim_head = projected.shape[-1], cos.shape[-1]
    rows = projected.numel() // width
    _rotate_first_heads[triton.cdiv(rows, _TILE_ROWS), 2](
        projected,
        cos,
        sin,
        rows,
        WIDTH=width,
        INNER=width // 3,
        DIM=dim_head,
        DIM_UP=triton.next_power_of_2(dim_head),
        TILE_ROWS=_TILE_ROWS,
        num_warps=_WARPS,
    )
