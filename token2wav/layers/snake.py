"""Snake activation, with one or two parameters per channel."""

from __future__ import annotations

import torch
from torch import nn

from token2wav.layers.streaming import Curve, FreezableLayer

_EPS = 1e-9  # added to β, as in the public code


class Snake(FreezableLayer):
    """Snake activation x + sin²(αx) / β with one α and β per channel.

    Args:
        beta: whether β is a parameter ("snakebeta"); else β equals α ("snake").
        log_scale: whether parameters are logarithms.
    """

    frequency: torch.Tensor
    inverse: torch.Tensor

    def __init__(self, channels: int, *, beta: bool, log_scale: bool) -> None:
        super().__init__()
        self.log_scale = log_scale
        initial = torch.zeros(channels) if log_scale else torch.ones(channels)
        self.alpha = nn.Parameter(initial)
        self.beta = nn.Parameter(initial.clone()) if beta else None
        for name in ("frequency", "inverse"):  # (channels, 1), filled by `freeze`
            self.register_buffer(name, None, persistent=False)

    def freeze(self) -> None:
        alpha, beta = (
            parameter.detach().exp() if self.log_scale else parameter.detach()
            for parameter in (self.alpha, self.alpha if self.beta is None else self.beta)
        )
        self.frequency = alpha[:, None]
        self.inverse = 1 / (beta[:, None] + _EPS)

    @property
    def curve(self) -> Curve:
        return Curve(self.frequency, self.inverse)

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes x (B, channels, T) to the same shape, and also writes it to `out` if given."""
        sine = torch.sin(x * self.frequency)
        return torch.addcmul(x, sine, sine * self.inverse, out=out)
