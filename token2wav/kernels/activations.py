"""Activation functions for kernels, in float32."""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
_TANH_CUBE = tl.constexpr(0.044715)
_INVERSE_PI = tl.constexpr(0.3183098861837907)
# π is the sum of these numbers. The first two have few bits, so their products with the number of
# half turns are exact (Cody-Waite reduction).
_PI_HIGH = tl.constexpr(3.140625)
_PI_MIDDLE = tl.constexpr(9.67502593994140625e-4)
_PI_LOW = tl.constexpr(1.509957990978376e-7)
# 1.5 * 2^23. Numbers of this size have no fractions in float32, so adding it rounds to an integer.
_ROUND = tl.constexpr(12582912.0)
# Coefficients of a polynomial that approximates the sine from -π/2 to π/2.
_CUBE = tl.constexpr(-0.16666667)
_POWER_5 = tl.constexpr(0.0083333310)
_POWER_7 = tl.constexpr(-0.00019840874)
_POWER_9 = tl.constexpr(2.7525562e-06)
_POWER_11 = tl.constexpr(-2.3889859e-08)


@triton.jit
def mish(x):
    """Computes x * tanh(softplus(x)) with one exponential. Above 20 it equals x to the last bit."""
    power = tl.exp(tl.minimum(x, 20.0))
    power = power * (power + 2.0)
    return tl.where(x > 20.0, x, x * (power / (power + 2.0)))


@triton.jit
def sine_squared(x):
    """Computes sin(x) ** 2, with an error of at most 3e-7 up to |x| of 10^4. For a far larger x,
    which has no fraction, the result is an arbitrary number from 0 to 1.

    The square does not depend on the sign of the sine. So this takes half of the instructions of
    `tl.sin`, and no branch.
    """
    half_turns = x * _INVERSE_PI + _ROUND - _ROUND  # x / π, rounded to an integer
    x = x - half_turns * _PI_HIGH - half_turns * _PI_MIDDLE - half_turns * _PI_LOW
    square = x * x
    series = square * _POWER_11 + _POWER_9
    series = square * series + _POWER_7
    series = square * series + _POWER_5
    series = square * series + _CUBE
    sine = x + x * square * series
    return tl.minimum(sine * sine, 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def snake(x, frequency, inverse):
    """Computes x + sin(frequency * x) ** 2 * inverse."""
    return x + sine_squared(x * frequency) * inverse


@triton.jit
def gelu(x, TANH: tl.constexpr):
    """Computes GELU, exactly or with the tanh approximation."""
    if TANH:
        # (1 + tanh(u)) / 2 equals the sigmoid of 2 u
        part = 1.0 / (1.0 + tl.exp(-(x + x * x * x * _TANH_CUBE) * _TANH_SCALE))
    else:
        part = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
    return x * part


@triton.jit
def activated(values, slopes, width, column, inside, slope, ACTIVATION: tl.constexpr):
    """Applies an activation. `slopes` has the rows a, b, c of Snake: b x + c sin(a x) ** 2."""
    if ACTIVATION == "snake":
        scale = tl.load(slopes + column, mask=inside, other=0.0)[None, :]
        straight = tl.load(slopes + width + column, mask=inside, other=0.0)[None, :]
        gain = tl.load(slopes + 2 * width + column, mask=inside, other=0.0)[None, :]
        sine = tl.sin(values * scale)
        values = values * straight + sine * sine * gain
    elif ACTIVATION == "leaky":
        values = tl.where(values < 0, values * slope, values)
    elif ACTIVATION == "elu":
        values = tl.where(values < 0, tl.exp(values) - 1, values)
    return values
