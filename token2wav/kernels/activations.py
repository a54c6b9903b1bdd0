"""Activation functions inside kernels, on float32."""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
_TANH_CUBE = tl.constexpr(0.044715)


@triton.jit
def mish(x):
    """Computes x * tanh(softplus(x)) with one exponential. Above 20 it equals x to the last bit."""
    power = tl.exp(tl.minimum(x, 20.0))
    power = power * (power + 2.0)
    return tl.where(x > 20.0, x, x * (power / (power + 2.0)))


@triton.jit
def snake(x, frequency, inverse):
    """Computes x + sin²(frequency * x) * inverse."""
    sine = tl.sin(x * frequency)
    return x + sine * (sine * inverse)


@triton.jit
def gelu(x, TANH: tl.constexpr):
    """Computes GELU, exactly or with the tanh approximation."""
    if TANH:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        part = 1.0 / (1.0 + tl.exp(-(x + x * x * x * _TANH_CUBE) * _TANH_SCALE))
    else:
        part = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
    return x * part
