"""Snake, and what keeps it from aliasing: BigVGAN computes it at twice the rate, between two low-pass filters.

The periodic term makes harmonics above half the sample rate, which would fold back into what is heard.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from token2wav.networks.streaming import WHOLE, Overlap, Piece, Streaming, strided_delay

FILTER_TAPS = 12
RATIO = 2
_HALF_WIDTH = 0.3  # of the transition, in cycles per sample
_EPS = 1e-9


def kaiser_sinc() -> list[float]:
    """Low-pass at half the band, `FILTER_TAPS` taps that add up to one: a sinc under a Kaiser window."""
    attenuation_db = 2.285 * (FILTER_TAPS // 2 - 1) * math.pi * 4 * _HALF_WIDTH + 7.95
    window = np.kaiser(FILTER_TAPS, 0.1102 * (attenuation_db - 8.7))  # Kaiser's rule above 50 dB; here 51
    time = np.arange(FILTER_TAPS) - (FILTER_TAPS - 1) / 2
    taps = window * np.sinc(time / RATIO)
    return [float(tap) for tap in taps / taps.sum()]


class LowPass(nn.Module):
    """Holds a filter. Checkpoints have one for each place where it is used."""

    filter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", torch.tensor(kaiser_sinc())[None, None])  # (1, 1, taps)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """As weights of a convolution that filters every channel of x (B, C, T) alike, (C, 1, taps)."""
        return self.filter.expand(x.shape[1], -1, -1)


class Upsample(LowPass):
    """Doubles the rate, (B, C, T) to (B, C, 2 T); the edges go on with their last value."""

    def __init__(self, channels: int, delay: int) -> None:
        super().__init__()
        pad = FILTER_TAPS // RATIO - 1
        cut = pad * RATIO + (FILTER_TAPS - RATIO) // 2
        self.overlap = Overlap(channels, FILTER_TAPS, RATIO, cut=cut, pad=pad, delay=delay)

    def forward(self, x: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        x = self.overlap.extended(x, piece)
        y = F.conv_transpose1d(x, RATIO * self.of(x), stride=RATIO, groups=x.shape[1])
        return self.overlap.settled(y, x.shape[2], piece)


class Downsample(Streaming):
    """Halves the rate, (B, C, 2 T) to (B, C, T)."""

    def __init__(self, channels: int, delay: int) -> None:
        super().__init__()
        self.left, self.right, self.delay = FILTER_TAPS // 2 - 1, FILTER_TAPS // 2, delay
        self.keeps = (channels, self.left - delay + RATIO * self.delayed)
        self.lowpass = LowPass()

    @property
    def delayed(self) -> int:
        return strided_delay(self.left - self.delay, FILTER_TAPS, RATIO)

    def forward(self, x: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        x = piece.extended(self, x, self.left, self.right, "replicate")
        return F.conv1d(x, self.lowpass.of(x), stride=RATIO, groups=x.shape[1])


class Snake(nn.Module):
    """x + sin²(αx) / β with one α and β per channel.

    Args:
        channels: of the input.
        beta: whether β is a parameter ("snakebeta"); else it is α ("snake").
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
        """Ends loading: what is computed from the parameters alone is computed once."""
        alpha, beta = (
            parameter.detach().exp() if self.log_scale else parameter.detach()
            for parameter in (self.alpha, self.alpha if self.beta is None else self.beta)
        )
        self.frequency = alpha[:, None]
        self.inverse = 1 / (beta[:, None] + _EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sine = torch.sin(x * self.frequency)
        return torch.addcmul(x, sine, sine * self.inverse)


class AntiAliased(nn.Module):
    """Snake at twice the rate, (B, C, T) to (B, C, T)."""

    def __init__(self, activation: Snake, *, delay: int = 0) -> None:
        super().__init__()
        self.act = activation
        channels = len(activation.alpha)
        self.upsample = Upsample(channels, delay)
        self.downsample = Downsample(channels, self.upsample.overlap.delayed)

    @property
    def delayed(self) -> int:
        """Positions that the output is late."""
        return self.downsample.delayed

    def forward(self, x: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        return self.downsample(self.act(self.upsample(x, piece)), piece)
