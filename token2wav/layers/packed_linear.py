"""Products with constant weights: the rounding of their operands, and on a CPU the layout of the
weights.

By default torch computes a linear layer with MKL, from the weight as it was loaded. oneDNN reads
weights in blocks, and is faster. With weights of 2,048 x 512, the product of 16 rows takes 0.35 ms
instead of 1.48 ms (2 cores of an AMD EPYC, 2026-11-24). torch has no public function that packs a
weight once. This module uses two operators that torch provides for its own compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.settings import DecoderPrecision

_ROWS = 16  # oneDNN chooses the layout for this many rows; other numbers are as fast
_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

# `float16x3`: a number is the sum of a large and a small float16 number, of 11 bits each. A product
# is small * large + large * small + large * large. The product of both small parts is negligible.
#
# The scales are powers of two, so they round nothing. Inputs are divided by 16, so inputs up to a
# million fit into float16. Weights are multiplied by 16, so weights up to 4,094 fit. The small part
# of inputs is scaled up, so that it keeps 11 bits. Inputs above 0.001 and weights above 0.01 keep
# 22 bits. The error of a smaller input is at most 2^-32, and that of a smaller weight 2^-29.
#
# The products with small parts are summed first. The matrix units of a GPU cut bits off a sum, and
# cut more the larger the sum is.
INPUT_SCALE, SMALL_SCALE = 2.0**-4, 2.0**11
PARTS: dict[DecoderPrecision, int] = {"float32": 1, "float16x3": 3, "float16": 1}


class PackedWeight:
    """Constant float32 weight of products, with the bias that is added to them.

    The operands are rounded to a precision, and sums are float32. A CPU multiplies the rounded
    operands in float32. So it rounds operands as a GPU does, and is slower than without rounding.

    Args:
        weight: (outputs, inputs), or (groups, outputs, inputs) for a product of each group, which
            is float32 only.
        bias: (outputs,), or (groups, 1, outputs).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        precision: DecoderPrecision = "float32",
    ) -> None:
        weight, self._bias = weight.detach().contiguous(), None if bias is None else bias.detach()
        self.precision, self._grouped = precision, weight.dim() == 3
        on_cpu = weight.device.type == "cpu"
        assert precision == "float32" or not self._grouped
        self._packed = _AVAILABLE and on_cpu and not self._grouped and precision == "float32"
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        elif precision == "float16":
            weight = _to_float16(weight)
        elif precision == "float16x3":
            scaled = weight / INPUT_SCALE
            large = scaled.half()
            # factors of small * large, large * small and large * large, in this order
            parts = large / SMALL_SCALE, (scaled - large).half(), large
            weight = torch.cat(parts, dim=1)
        self._weight = weight.float() if on_cpu and not self._packed else weight

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rounds rows (..., inputs); `float16x3` makes them three times as long."""
        if self.precision == "float16":
            return _to_float16(rows)
        if self.precision == "float16x3":
            scaled = rows * INPUT_SCALE
            # Larger inputs become infinite. The audio is then NaN, and its stream ends.
            large = scaled.half()
            return torch.cat((((scaled - large) * SMALL_SCALE).half(), large, large), dim=-1)
        return rows

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Computes the products (..., outputs) of rows (..., inputs)."""
        return self.multiply(self.rounded(rows))

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Computes the products of rows (..., inputs) that `rounded` returned. With groups, the
        rows are (groups, n, inputs).
        """
        bias = self._bias
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                rows.contiguous(), self._weight, bias, "none", [], ""
            )
            return y
        if self._grouped:
            columns = self._weight.transpose(1, 2)
            return torch.bmm(rows, columns) if bias is None else torch.baddbmm(bias, rows, columns)
        if self.precision == "float32":
            return F.linear(rows, self._weight, bias)
        if rows.device.type == "cpu":
            return F.linear(rows.float(), self._weight, bias)
        # `F.linear` would round the results too
        y = torch.mm(rows.flatten(0, -2), self._weight.T, out_dtype=torch.float32)
        y = y.unflatten(0, rows.shape[:-1])
        return y if bias is None else y.add_(bias)


def _to_float16(x: torch.Tensor) -> torch.Tensor:
    """Rounds to float16. A number beyond the range becomes the largest one; NaN stays."""
    most = torch.finfo(torch.float16).max
    return x.clamp(-most, most).half()


class PackedCopy:
    """Packed copy of the weight of a layer, made at its first use."""

    def __init__(
        self,
        # Turns the weight of the layer into the weight of products, and its bias into their bias.
        arrange: Callable[[torch.Tensor], torch.Tensor],
        arrange_bias: Callable[[torch.Tensor], torch.Tensor] | None = None,
        precision: DecoderPrecision = "float32",
    ) -> None:
        self._arrange, self._arrange_bias, self.precision = arrange, arrange_bias, precision
        self._copy: tuple[tuple[Any, ...], PackedWeight] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedCopy:
        """Returns a copy that packs anew, because torch cannot copy oneDNN's layout."""
        return PackedCopy(self._arrange, self._arrange_bias, self.precision)

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
        key = _identity(weight), _identity(bias), self.precision
        copy = self._copy
        if copy is None or copy[0] != key:
            if bias is not None and self._arrange_bias:
                bias = self._arrange_bias(bias)
            self._copy = copy = key, PackedWeight(self._arrange(weight), bias, self.precision)
        return copy[1]


def _identity(x: torch.Tensor | None) -> tuple[int, int] | None:
    """Returns what changes if a tensor is replaced, or if its values are."""
    return None if x is None else (x.data_ptr(), 0 if x.is_inference() else x._version)


class PackedLinear(nn.Module):
    """Linear layer for inference on a CPU. It keeps its weight and bias only as a `PackedWeight`,
    and therefore not in its `state_dict`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight = PackedWeight(linear.weight, linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight.product(x)


def pack_linears(network: nn.Module) -> None:
    """Replaces all linear layers in float32 of a network on a CPU by packed ones."""
    for parent in list(network.modules()) if _AVAILABLE else ():
        for name, child in parent.named_children():
            if type(child) is not nn.Linear or child.weight.dtype != torch.float32:
                continue
            if child.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(child))
