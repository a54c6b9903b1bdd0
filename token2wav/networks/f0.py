"""Mel to F0."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from token2wav.networks.configs import HiFTConfig
from token2wav.networks.streaming import WHOLE, Piece, StreamConv, causal_conv, centred_conv, lookahead_conv

F0_LOOKAHEAD = 3  # mel frames to the right that an F0 value of a causal vocoder needs
_CONVS, _KERNEL = 5, 3


class F0Predictor(nn.Module):
    """Mel to F0 in double precision (Q17): F0 integrates into phase, so its errors grow.

    Attributes:
        delayed: frames that F0 is late in pieces.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        channels = config.f0_channels
        if config.causal:
            convs = [lookahead_conv(config.in_channels, channels, F0_LOOKAHEAD + 1)]
            convs += [causal_conv(channels, channels, _KERNEL, delay=F0_LOOKAHEAD) for _ in range(_CONVS - 1)]
        else:
            widths = [config.in_channels] + [channels] * (_CONVS - 1)
            convs = [centred_conv(width, channels, _KERNEL, delay=delay) for delay, width in enumerate(widths)]
        self.delayed, self._rounds = convs[-1].delayed, config.causal
        self.condnet = nn.Sequential(*(layer for conv in convs for layer in (weight_norm(conv), nn.ELU())))
        self.classifier = nn.Linear(channels, 1)

    def forward(self, mel: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        """mel (B, bands, T) to F0 in Hz, (B, T), `delayed` frames late; as float32 where published code rounds it."""
        x = mel.to(self.classifier.weight.dtype)
        for layer in self.condnet:
            x = layer(x, piece) if isinstance(layer, StreamConv) else layer(x)
        f0 = self.classifier(x.transpose(1, 2)).abs().squeeze(-1)
        return f0.to(mel.dtype) if self._rounds else f0
