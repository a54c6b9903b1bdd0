"""Arithmetic of convolutions on kernels: how the operands of their products are rounded.

With TF32 the kernels round every input of a product to 10 bits of mantissa when they store it.
Tensor cores ignore the other bits. So they compute the same products as any other device. With
float16 they round inputs when they read them, to as many bits of mantissa.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from token2wav.networks.estimator import Estimator

Precision = Literal["tf32", "tf32x3", "ieee", "float16"]


@triton.jit
def rounded(values):
    """Rounds float32 to the nearest number with 10 bits of mantissa; keeps infinity and NaN."""
    bits = values.to(tl.int32, bitcast=True)
    near = (bits + 0xFFF + ((bits >> 13) & 1)) & -8192
    return tl.where(values == values, near.to(tl.float32, bitcast=True), values)


@triton.jit
def halved(values):
    """Rounds float32 to float16. A number beyond the range becomes the largest one; NaN stays."""
    near = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    return tl.where(values == values, near, values).to(tl.float16)


@triton.jit
def rounded_product(inputs, weight, PRECISION: tl.constexpr):
    """Computes the product of inputs, which it rounds to a precision, and rounded weights."""
    if PRECISION == "float16":
        result = tl.dot(halved(inputs), weight)
    else:
        if PRECISION == "tf32":
            inputs = rounded(inputs)
        result = tl.dot(inputs, weight, input_precision=PRECISION)
    return result


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to the nearest number with 10 bits of mantissa, as `rounded` on a device."""
    bits = x.contiguous().view(torch.int32)
    near = (bits + 0xFFF + ((bits >> 13) & 1)) & -8192
    return torch.where(x == x, near.view(torch.float32), x)


def rounded_weights(weights: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Rounds the weights of a convolution as its precision needs it."""
    if precision == "float16":
        most = torch.finfo(torch.float16).max
        return weights.clamp(-most, most).half().contiguous()
    return tf32(weights) if precision == "tf32" else weights.contiguous()


def precision_of(estimator: Estimator) -> Precision:
    """Returns the arithmetic of the convolutions of an estimator."""
    return precision_beside(estimator.cache_type, half_inputs=estimator.half_convolution_inputs)


def precision_beside(dtype: torch.dtype, *, half_inputs: bool = False) -> Precision:
    """Returns the arithmetic of float32 convolutions in a network whose other products have a
    dtype. TF32 has as many bits of mantissa as float16, and the range of float32.

    Args:
        half_inputs: round to float16 rather than to TF32.
    """
    if dtype != torch.float16:
        return "tf32x3"
    return "float16" if half_inputs else "tf32"
