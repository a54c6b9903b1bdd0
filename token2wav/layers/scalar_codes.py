"""Finite scalar quantisation: each code stands for several values, each with a few levels."""

from __future__ import annotations

import torch
from torch import nn


class ScalarCodes(nn.Module):
    """Values of codes. A code numbers the combinations of the levels of its values, the first value
    changing fastest.

    Args:
        levels: levels of every value of a code.
        to_one: whether the levels reach from -1 to 1. By default they lie around 0 in steps of 1 /
            (levels // 2), so of an even number only the lowest one is at -1.
    """

    levels: torch.Tensor
    strides: torch.Tensor
    middle: torch.Tensor

    def __init__(self, levels: tuple[int, ...], *, to_one: bool = False) -> None:
        super().__init__()
        counts = torch.tensor(levels)
        strides = counts.cumprod(0).div(counts, rounding_mode="floor")
        middle = (counts - 1) / 2 if to_one else counts // 2
        for name, values in (("levels", counts), ("strides", strides), ("middle", middle)):
            self.register_buffer(name, values[:, None], persistent=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Converts codes (B, codes, T) to values (B, codes * values, T) float32."""
        digits = codes[:, :, None] // self.strides % self.levels
        return ((digits - self.middle) / self.middle).flatten(1, 2)
