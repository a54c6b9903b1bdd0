"""Snake activation, with one or two parameters per channel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from token2wav.layers.streaming import FreezableLayer

_EPS = 1e-9  # added to β, as in the public code


class SnakeLayer(FreezableLayer):
    """Base of Snake activations.

    Attributes:
        kernel: function that computes the activation of a frozen layer in one launch, with the
            arguments of `snake_signal` in kernels/snake.py; None for operators of torch.
    """

    kernel: Callable[..., torch.Tensor] | None = None


class Snake(SnakeLayer):
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

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes x (B, channels, T) to the same shape, and also writes it to `out` if given."""
        if self.kernel is not None:
            return self.kernel(x, self.frequency, self.inverse, out)
        sine = torch.sin(x * self.frequency)
        return torch.addcmul(x, sine, sine * self.inverse, out=out)
