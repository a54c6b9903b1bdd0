"""Norms over channels inside and outside of other kernels: LayerNorm with the modulation of an ODE
time or with weights, alone or fused with the gate and the sum before it.

A row stays in registers between the sum and the norm. So the residual stream is read and written
once for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from token2wav.kernels.dependent_launch import launch_options, wait_for_earlier_kernel

_EPSILON = 1e-6  # the epsilon of `modulated_norm` in networks/dit.py
_MOST_WARPS = 4


@dataclass(frozen=True, eq=False)
class NormVectors:
    """Vectors of a norm: norm(x) * (1 + scale) + shift.

    Attributes:
        shift, scale: (dim,) float32, contiguous.
        epsilon: number added to the variance.
    """

    shift: torch.Tensor
    scale: torch.Tensor
    epsilon: float = _EPSILON

    @classmethod
    def of(cls, norm: torch.nn.LayerNorm) -> NormVectors:
        """Returns the vectors of a norm with weights."""
        return cls(norm.bias.detach().float(), norm.weight.detach().float() - 1, norm.eps)


@triton.jit
def normalized(x, dim, shift, scale, columns, inside, epsilon):
    """Computes norm(x) * (1 + scale) + shift of one row, which is zero outside."""
    mean = tl.sum(x, axis=0) / dim
    centred = tl.where(inside, x - mean, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, axis=0) / dim + epsilon)
    shifts = tl.load(shift + columns, mask=inside, other=0.0)
    scales = tl.load(scale + columns, mask=inside, other=0.0)
    return centred / deviation * (1.0 + scales) + shifts


@triton.jit
def _modulated_norm(x, shift, scale, out, dim, epsilon, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < dim
    values = tl.load(x + row * dim + columns, mask=inside, other=0.0)
    y = normalized(values, dim, shift, scale, columns, inside, epsilon)
    tl.store(out + row * dim + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm(x, h, gate, shift, scale, out, dim, epsilon, WIDTH: tl.constexpr):
    wait_for_earlier_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < dim
    at = row * dim + columns
    added = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    if gate is not None:
        added *= tl.load(gate + columns, mask=inside, other=0.0)
    values = tl.load(x + at, mask=inside, other=0.0) + added
    tl.store(x + at, values, mask=inside)
    y = normalized(values, dim, shift, scale, columns, inside, epsilon)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def row_width(dim: int) -> dict[str, int]:
    """Returns the arguments of a kernel for the width of a row of floats. A thread loads 16 bytes
    or more.
    """
    width = triton.next_power_of_2(dim)
    return {"WIDTH": width, "num_warps": min(_MOST_WARPS, max(1, width // 128))}


def modulated_norm(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Computes norm(x) * (1 + scale) + shift.

    Args:
        x: (..., dim) float32, contiguous.
        shift, scale: (dim,) float32, contiguous.
    """
    assert x.is_contiguous()
    out = torch.empty_like(x, dtype=dtype)
    dim = x.shape[-1]
    _modulated_norm[(x.numel() // dim,)](x, shift, scale, out, dim, _EPSILON, **row_width(dim))
    return out


def gated_norm(
    x: torch.Tensor,
    h: torch.Tensor,
    gate: torch.Tensor | None,
    shift: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Adds gate * h to x in place, and returns norm(x) * (1 + scale) + shift.

    Args:
        x: (..., dim) float32, contiguous: the residual stream.
        h: (..., dim) contiguous: output of attention, of convolutions or of the feed-forward layer.
        gate, shift, scale: (dim,) float32, contiguous; no gate adds h as it is.
        dtype: dtype of the result; None for the dtype of h.
    """
    out = torch.empty_like(h, dtype=dtype)
    _add_and_norm(x, h, gate, NormVectors(shift, scale), out)
    return out


def added_norm(x: torch.Tensor, h: torch.Tensor, norm: NormVectors) -> torch.Tensor:
    """Adds h to x in place, and returns the norm of x in the dtype of h; x and h are as in
    `gated_norm`.
    """
    out = torch.empty_like(h)
    _add_and_norm(x, h, None, norm, out)
    return out


def _add_and_norm(
    x: torch.Tensor,
    h: torch.Tensor,
    gate: torch.Tensor | None,
    norm: NormVectors,
    out: torch.Tensor,
) -> None:
    assert x.is_contiguous()
    assert h.is_contiguous()
    dim = x.shape[-1]
    _gated_norm[(x.numel() // dim,)](
        x,
        h,
        gate,
        norm.shift,
        norm.scale,
        out,
        dim,
        norm.epsilon,
        **row_width(dim),
        **launch_options(),
    )
