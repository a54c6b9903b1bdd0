"""Feed-forward part of a transformer layer, with and without a gate.

Checkpoints have different names for the linear layers of the same computation, so the names are an
argument.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, from (..., width) to the same shape.

    Args:
        inner: width between the layers.
        names: names of the layers in checkpoints, in the order of the computation.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
        *,
        names: tuple[str, str] = ("fc1", "fc2"),
        bias: bool = False,
    ) -> None:
        super().__init__()
        self._activation = activation
        up, down = names
        self.add_module(up, nn.Linear(width, inner, bias=bias))
        self.add_module(down, nn.Linear(inner, width, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.children()
        return down(self._activation(up(x)))


class GatedFeedForward(nn.Module):
    """Feed-forward part with a gate, down(silu(gate(x)) * up(x)), without biases.

    Args:
        names: names of gate, up and down in checkpoints.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        gate, up, down = names
        self.add_module(gate, nn.Linear(width, inner, bias=False))
        self.add_module(up, nn.Linear(width, inner, bias=False))
        self.add_module(down, nn.Linear(inner, width, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.children()
        return down(F.silu(gate(x)) * up(x))
