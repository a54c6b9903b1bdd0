"""Mel to F0, with the reach of that in both directions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from token2wav.hift_config import HiFTConfig
from token2wav.vocoder.convolutions import CausalConv

F0_LOOKAHEAD = 3  # mel frames to the right that an F0 value needs
_F0_CAUSAL_CONVS, _F0_KERNEL = 4, 3
F0_LEFT_REACH = _F0_CAUSAL_CONVS * (_F0_KERNEL - 1)  # mel frames to the left


class F0Predictor(nn.Module):
    """Mel to F0 in double precision (Q17): F0 integrates into phase, so its errors grow."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = [weight_norm(nn.Conv1d(config.in_channels, config.f0_channels, F0_LOOKAHEAD + 1))]
        for _ in range(_F0_CAUSAL_CONVS):
            layers += [nn.ELU(), weight_norm(CausalConv(config.f0_channels, config.f0_channels, _F0_KERNEL))]
        self.condnet = nn.Sequential(*layers, nn.ELU())
        self.classifier = nn.Linear(config.f0_channels, 1)

    def forward(self, mel: torch.Tensor, final: bool) -> torch.Tensor:
        """mel (B, bands, T) to F0 in Hz, float32, (B, T); without the last 3 frames unless `final`."""
        x = mel.to(self.classifier.weight.dtype)
        if final:
            x = F.pad(x, (0, F0_LOOKAHEAD))
        return self.classifier(self.condnet(x).transpose(1, 2)).abs().squeeze(-1).to(mel.dtype)
