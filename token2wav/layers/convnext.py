"""ConvNeXt block of codec decoders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.layers.convolutions import causal_conv, centred_conv
from token2wav.layers.streaming import OFFLINE, ON_TIME, Delay, StreamModule, StreamStep, Timing

_EPS = 1e-6  # of the norm


class ConvNeXt(StreamModule):
    """A convolution of every channel, and a feed-forward part, added to the input (B, C, T).

    Args:
        inner: channels within the feed-forward part; None for four times as many.
        scaled: whether every channel of the feed-forward part has a scale.
        centred: whether the convolution reads equally far to both sides; by default it is causal.
        norm: makes a norm over the channels; None for a layer norm.
    """

    def __init__(
        self,
        channels: int,
        inner: int | None = None,
        kernel: int = 7,
        *,
        scaled: bool = True,
        centred: bool = False,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        inner, norm = inner or 4 * channels, norm or partial(nn.LayerNorm, eps=_EPS)
        convolution = centred_conv if centred else causal_conv
        self.dwconv = convolution(channels, channels, kernel, groups=channels)
        self.norm: Any = norm(channels)
        self.pwconv1, self.pwconv2 = nn.Linear(channels, inner), nn.Linear(inner, channels)
        self.gamma = nn.Parameter(torch.ones(channels)) if scaled else None
        self.wait = Delay(channels)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        output = self.dwconv.place(timing)
        self.wait.align(timing, output)
        return output

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        h = self.norm(self.dwconv(x, step).transpose(1, 2))
        h = self.pwconv2(F.gelu(self.pwconv1(h)))
        h = h if self.gamma is None else self.gamma * h
        return self.wait(x, step) + h.transpose(1, 2)
