"""CosyVoice1's flow-matching estimator, a U-Net of several resolutions that reads all frames.

Its convolutions are centred, and its norms average over all frames. So a later frame changes every
earlier one, and a stream cannot store the state of a layer.
Parameters have the names of public `flow.pt` files below `decoder.estimator.`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.networks.estimator import AttentionContext
from token2wav.networks.unet import UNetEstimator
from token2wav.published.sizes import UNetConfig

_GROUPS = 8  # of the norms


class CentredUNet(UNetEstimator):
    """U-Net estimator of `levels` resolutions."""

    def __init__(self, bands: int, levels: int, sizes: UNetConfig) -> None:
        super().__init__(bands, sizes, block=GroupedBlock, conv=_Centred, levels=levels)


class GroupedBlock(nn.Module):
    """Centred convolution, and a norm over groups of channels and all frames."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        conv = nn.Conv1d(inputs, outputs, 3, padding=1)
        self.block = nn.ModuleDict({"0": conv, "1": nn.GroupNorm(_GROUPS, outputs)})

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        x = self.block["0"](x.transpose(1, 2))
        return F.mish(self.block["1"](x)).transpose(1, 2)


class _Centred(nn.Conv1d):
    """Centred convolution of frames (B, T, channels)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)

    def forward(self, x: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)
