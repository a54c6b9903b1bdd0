"""Arithmetic of convolutions on kernels: how the operands of their products are rounded.

Tensor cores ignore the low 13 bits of a float32 input, so they would cut it off to TF32. Kernels
round inputs to TF32 themselves, so the products are the same on any device. Kernels of signals
round to TF32 when they store a signal; `rounded_product` rounds an input when the product reads it.
Inputs are rounded to float16 on reading, because signals stay float32.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from token2wav.networks.estimator import Estimator

# Arithmetic of a product: operands in TF32; three TF32 products, as precise as float32; operands
# that are not rounded (float64); operands in float16.
Precision = Literal["tf32", "tf32x3", "ieee", "float16"]


@triton.jit
def rounded(values):
    """Rounds float32 to the nearest TF32 (11 significant bits); keeps infinity and NaN."""
    bits = values.to(tl.int32, bitcast=True)
    near = (bits + 0xFFF + ((bits >> 13) & 1)) & -8192
    return tl.where(values == values, near.to(tl.float32, bitcast=True), values)


@triton.jit
def to_float16(values):
    """Rounds float32 to float16. A number beyond the range becomes the largest one; NaN stays."""
    near = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    return tl.where(values == values, near, values).to(tl.float16)


@triton.jit
def rounded_product(inputs, weight, PRECISION: tl.constexpr):
    """Rounds inputs to a precision, and multiplies them by weights of `rounded_weights`."""
    if PRECISION == "float16":
        result = tl.dot(to_float16(inputs), weight)
    else:
        if PRECISION == "tf32":
            inputs = rounded(inputs)
        result = tl.dot(inputs, weight, input_precision=PRECISION)
    return result


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to the nearest TF32 (11 significant bits), as `rounded` on a device."""
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
    """Returns the arithmetic of the float32 convolutions of a network that computes its other
    products in a dtype. TF32 has as many significant bits as float16, and the range of float32.

    Args:
        half_inputs: round to float16 rather than to TF32.
    """
    if dtype != torch.float16:
        return "tf32x3"
    return "float16" if half_inputs else "tf32"
