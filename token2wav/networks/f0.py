"""Mel to F0."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from token2wav.networks.configs import HiFTConfig
from token2wav.networks.streaming import WHOLE, Piece, StreamConv, causal_conv, lookahead_conv

F0_LOOKAHEAD = 3  # mel frames to the right that an F0 value needs
_F0_CAUSAL_CONVS, _F0_KERNEL = 4, 3


class F0Predictor(nn.Module):
    """Mel to F0 in double precision (Q17): F0 integrates into phase, so its errors grow."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        channels = config.f0_channels
        layers: list[nn.Module] = [weight_norm(lookahead_conv(config.in_channels, channels, F0_LOOKAHEAD + 1))]
        for _ in range(_F0_CAUSAL_CONVS):
            layers += [nn.ELU(), weight_norm(causal_conv(channels, channels, _F0_KERNEL, delay=F0_LOOKAHEAD))]
        self.condnet = nn.Sequential(*layers, nn.ELU())
        self.classifier = nn.Linear(channels, 1)

    def forward(self, mel: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        """mel (B, bands, T) to F0 in Hz, float32, (B, T); `F0_LOOKAHEAD` frames late."""
        x = mel.to(self.classifier.weight.dtype)
        for layer in self.condnet:
            x = layer(x, piece) if isinstance(layer, StreamConv) else layer(x)
        return self.classifier(x.transpose(1, 2)).abs().squeeze(-1).to(mel.dtype)
