"""Simplest memory of an estimator: it keeps the whole past."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from token2wav.networks.estimator import Attend, Convolution


class KeptContext:
    """Keys, values and ends of convolutions' inputs of some rows.

    Args:
        shapes: state of each convolution of the estimator, `Estimator.conv_state_shapes`.
        rows: rows of its inputs.
    """

    def __init__(self, shapes: Iterable[tuple[int, int]], rows: int) -> None:
        self.tails = [torch.zeros(rows, *shape) for shape in shapes]
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        tail = self.tails[index]
        x = torch.cat((tail, x), dim=2)
        self.tails[index] = x[:, :, -tail.shape[2] :]
        return conv(x)

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        k = self.keys[layer] = torch.cat((self.keys.get(layer, k[:, :0]), k), dim=1)
        v = self.values[layer] = torch.cat((self.values.get(layer, v[:, :0]), v), dim=1)
        return attend(q, k, v, bias)
