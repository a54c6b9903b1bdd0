"""Products with constant weights: the rounding of their operands, and on a CPU the layout of the
weights.

By default torch computes a linear layer with MKL, from the weight as it was loaded. oneDNN reads
weights in blocks, and is faster. With weights of 2,048 x 512, the product of 16 rows takes 0.35 ms
instead of 1.48 ms (2 cores of an AMD EPYC, 2026-11-24). torch has no public function that packs a
weight once. This module uses two operators that torch provides for its own compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.settings import DecoderPrecision

_ROWS = 16  # oneDNN chooses the layout for this many rows; other numbers are as fast
_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_TF32_BITS = -1 << 13  # of a float32


class PackedWeight:
    """Constant float32 weight of products.

    The operands are rounded to a precision, and sums are float32. A CPU multiplies the rounded
    operands in float32. So it has the error of a GPU, and takes longer than without rounding.

    Args:
        weight: (outputs, inputs), or (groups, outputs, inputs) for a product of each group, which
            is float32 only.
    """

    def __init__(self, weight: torch.Tensor, precision: DecoderPrecision = "float32") -> None:
        weight = weight.detach().contiguous()
        self._precision, self._grouped = precision, weight.dim() == 3
        on_cpu = weight.device.type == "cpu"
        assert precision == "float32" or not self._grouped
        self._packed = _AVAILABLE and on_cpu and not self._grouped and precision == "float32"
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._parts = self.split(weight)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rounds an operand, and returns its parts: one, or two for `tf32x3`, the larger first."""
        if self._precision == "float32":
            return (x,)
        if self._precision == "float16":
            # A number above 65,504 becomes infinite. The audio is then NaN, and its stream ends.
            half = x.half()
            return (half.float() if x.device.type == "cpu" else half,)
        large = _tf32(x)
        return large, _tf32(x - large)

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the product of rows (..., inputs), plus a bias (outputs,), to (..., outputs)."""
        return self.multiply(self.split(rows), bias)

    def multiply(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the product of rows of which `split` returned the parts.

        With groups, the rows are (groups, n, inputs), and the bias is (groups, 1, outputs).
        """
        rows, weight = parts[0], self._parts[0]
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                rows.contiguous(), weight, bias, "none", [], ""
            )
            return y
        if self._grouped:
            columns = weight.transpose(1, 2)
            return torch.bmm(rows, columns) if bias is None else torch.baddbmm(bias, rows, columns)
        if rows.dtype == torch.float16:  # `F.linear` would round the results too
            y = torch.mm(rows.flatten(0, -2), weight.T, out_dtype=torch.float32)
            y = y.unflatten(0, rows.shape[:-1])
            return y if bias is None else y.add_(bias)
        if self._precision == "tf32x3":
            # The products with small parts come first, so that their sum is rounded least.
            with _tf32_products():
                y = F.linear(parts[1], weight, bias)
                y += F.linear(rows, self._parts[1])
                y += F.linear(rows, weight)
            return y
        return F.linear(rows, weight, bias)


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 towards 0, to 10 bits of mantissa, in one launch."""
    return x.view(torch.int32).bitwise_and(_TF32_BITS).view(torch.float32)


@contextmanager
def _tf32_products() -> Iterator[None]:
    """Lets cuBLAS multiply float32 in TF32. Operands that have no more bits lose nothing.

    torch has this switch for the whole process only. A GPU computes one batch at a time, and a
    captured graph keeps the kernels of its capture.
    """
    switch = torch.backends.cuda.matmul
    before, switch.allow_tf32 = switch.allow_tf32, True
    try:
        yield
    finally:
        switch.allow_tf32 = before


class PackedCopy:
    """Packed copy of the weight of a layer, made at its first use."""

    def __init__(
        self,
        arrange: Callable[[torch.Tensor], torch.Tensor],  # weight of the layer, to that of products
        precision: DecoderPrecision = "float32",
    ) -> None:
        self._arrange, self.precision = arrange, precision
        self._copy: tuple[tuple[int, int], PackedWeight] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedCopy:
        """Returns a copy that packs anew, because torch cannot copy oneDNN's layout."""
        return PackedCopy(self._arrange, self.precision)

    def of(self, weight: torch.Tensor) -> PackedWeight:
        key = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        copy = self._copy
        if copy is None or copy[0] != key:
            self._copy = copy = key, PackedWeight(self._arrange(weight), self.precision)
        return copy[1]


class PackedLinear(nn.Module):
    """Linear layer for inference. It keeps its weight in the packed layout or in rounded parts
    alone, which are no part of its `state_dict`.
    """

    def __init__(self, linear: nn.Linear, precision: DecoderPrecision = "float32") -> None:
        super().__init__()
        self._weight, self.bias = PackedWeight(linear.weight, precision), linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight.product(x, self.bias)


def pack_linears(network: nn.Module, precision: DecoderPrecision = "float32") -> None:
    """Replaces all linear layers in float32 of a network by packed ones: on a CPU, or where their
    operands are rounded.
    """
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                on_cpu = child.weight.device.type == "cpu"
                if precision != "float32" or (on_cpu and _AVAILABLE):
                    setattr(parent, name, PackedLinear(child, precision))
