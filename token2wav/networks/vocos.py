"""Vocos: ConvNeXt blocks, whose outputs are log-magnitudes and phases of an inverse STFT. Some
codecs have blocks with group norms, and attention, before it. None of these layers is causal.

Modules have the names of the published weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.layers.convnext import ConvNeXt
from token2wav.layers.convolutions import centred_conv
from token2wav.layers.full_attention import full_attention
from token2wav.layers.inverse_stft import MOST_MAGNITUDE, InverseSTFT

_EPS = 1e-6
_GROUPS = 32  # of group norms


class Vocos(nn.Module):
    """Vocos, from channels of frames to audio.

    Args:
        inputs, width, inner: channels of the input, of the blocks, and within a block.
        n_fft, hop: samples of a window of the inverse STFT, and from a window to the next one.
        pos_net: layers between the first convolution and the first norm.
        norm: makes a norm over `width` channels; None for layer norms.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        inner: int,
        layers: int,
        n_fft: int,
        hop: int,
        *,
        pos_net: nn.Module | None = None,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        norm = norm or partial(nn.LayerNorm, eps=_EPS)
        self.embed = centred_conv(inputs, width, 7)
        self.pos_net = pos_net or nn.Identity()
        self.norm, self.final_layer_norm = norm(width), nn.LayerNorm(width, _EPS)
        self.convnext = nn.ModuleList(
            ConvNeXt(width, inner, centred=True, norm=norm) for _ in range(layers)
        )
        self.out = nn.Linear(width, n_fft + 2)
        self.istft = InverseSTFT(n_fft, hop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the audio (B, 1, hop * T) of x (B, inputs, T)."""
        x = self.pos_net(self.embed(x))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        for block in self.convnext:
            x = block(x)
        x = self.out(self.final_layer_norm(x.transpose(1, 2))).transpose(1, 2)
        return self.istft.of_polar(x, most=MOST_MAGNITUDE)


class ResidualBlock(nn.Module):
    """Two convolutions, each after a group norm and an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = group_norm(width), group_norm(width)
        self.conv1, self.conv2 = (centred_conv(width, width, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class AttentionBlock(nn.Module):
    """Attention of every position to all positions after a group norm, with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = group_norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).transpose(1, 2)
        h = full_attention(self.q(h), self.k(h), self.v(h), heads=1)
        return x + self.proj_out(h).transpose(1, 2)


def group_norm(width: int) -> nn.GroupNorm:
    """Makes a norm of groups of channels, which averages over all positions."""
    return nn.GroupNorm(_GROUPS, width, _EPS)
