"""LayerNorm with the modulation of an ODE time, alone or fused with the gate and the sum before it.

A row stays in registers between the sum and the norm. So the residual stream is read and written
once for both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-6)  # the epsilon of `modulated_norm` in networks/dit.py


@triton.jit
def _norm(x, dim, shift, scale, out, row, columns, inside):
    mean = tl.sum(x, axis=0) / dim
    centred = tl.where(inside, x - mean, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, axis=0) / dim + _EPSILON)
    shifts = tl.load(shift + columns, mask=inside, other=0.0)
    scales = tl.load(scale + columns, mask=inside, other=0.0)
    y = centred / deviation * (1.0 + scales) + shifts
    tl.store(out + row * dim + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _modulated_norm(x, shift, scale, out, dim, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < dim
    values = tl.load(x + row * dim + columns, mask=inside, other=0.0)
    _norm(values, dim, shift, scale, out, row, columns, inside)


@triton.jit
def _gated_norm(x, h, gate, shift, scale, out, dim, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < dim
    at = row * dim + columns
    gates = tl.load(gate + columns, mask=inside, other=0.0)
    added = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + at, mask=inside, other=0.0) + gates * added
    tl.store(x + at, values, mask=inside)
    _norm(values, dim, shift, scale, out, row, columns, inside)


def modulated_norm(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Computes norm(x) * (1 + scale) + shift.

    Args:
        x: (..., dim) float32, contiguous.
        shift, scale: (dim,) float32, contiguous.
        dtype: dtype of the result.
    """
    assert x.is_contiguous()
    out = torch.empty_like(x, dtype=dtype)
    dim = x.shape[-1]
    _modulated_norm[(x.numel() // dim,)](
        x, shift, scale, out, dim, WIDTH=triton.next_power_of_2(dim)
    )
    return out


def gated_norm(
    x: torch.Tensor, h: torch.Tensor, gate: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Adds gate * h to x in place, and returns norm(x) * (1 + scale) + shift in the dtype of h.

    Args:
        x: (..., dim) float32, contiguous: the residual stream.
        h: (..., dim) contiguous: output of attention or of the feed-forward layer.
        gate, shift, scale: (dim,) float32, contiguous.
    """
    assert x.is_contiguous()
    assert h.is_contiguous()
    out = torch.empty_like(h)
    dim = x.shape[-1]
    _gated_norm[(x.numel() // dim,)](
        x, h, gate, shift, scale, out, dim, WIDTH=triton.next_power_of_2(dim)
    )
    return out
