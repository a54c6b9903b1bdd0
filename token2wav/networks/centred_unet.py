"""CosyVoice1's flow-matching estimator, a U-Net of several resolutions that reads all frames.

Its convolutions are centred, and its norms average over all frames. So a later frame changes every
earlier one, and a stream cannot store the state of a layer.
Parameters have the names of public `flow.pt` files below `decoder.estimator.`.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.networks.estimator import AttentionContext, Modulation, Rope
from token2wav.networks.unet import (
    ResidualBlock,
    TimeMLP,
    TransformerLayer,
    UNetBlock,
    UNetEstimator,
)
from token2wav.published.sizes import UNetConfig

_GROUPS = 8  # of the norms


class CentredUNet(UNetEstimator):
    """U-Net estimator. Each level has half of the frames of the level before. The way up joins the
    frames of a level to those of the way down.

    Args:
        bands: mel bands; state, conditions, speaker vector and prompt have the same width.
        levels: resolutions, the first of which has all frames.
    """

    def __init__(self, bands: int, levels: int, sizes: UNetConfig) -> None:
        super().__init__()
        channels = sizes.channels
        inputs, time_channels = 4 * bands, 4 * channels
        self.time_mlp, self.time_embed_mixer = TimeMLP(inputs, time_channels), None

        def block(inputs: int, *last: nn.Module) -> UNetBlock:
            transformer = (TransformerLayer(sizes) for _ in range(sizes.layers))
            residual = ResidualBlock(inputs, channels, time_channels, GroupedBlock)
            return UNetBlock([residual, nn.ModuleList(transformer), *last])

        halving = partial(nn.Conv1d, channels, channels, 3, stride=2, padding=1)
        doubling = partial(nn.ConvTranspose1d, channels, channels, 4, stride=2, padding=1)
        # `blocks` returns them in this order.
        self.down_blocks, self.mid_blocks, self.up_blocks = (nn.ModuleList() for _ in range(3))
        for level in range(levels):
            lowest, highest = level == levels - 1, level == 0
            down = _Centred(channels) if lowest else _Resampling(halving())
            self.down_blocks.append(block(inputs if highest else channels, down))
        self.mid_blocks.extend(block(channels) for _ in range(sizes.mid_blocks))
        for level in reversed(range(levels)):
            up = _Resampling(doubling()) if level else _Centred(channels)
            self.up_blocks.append(block(2 * channels, up))
        self.final_block = GroupedBlock(channels, channels)
        self.final_proj = nn.Conv1d(channels, bands, 1)

    def velocity(
        self,
        x: torch.Tensor,
        conditions: torch.Tensor,
        modulation: Modulation,
        bias: torch.Tensor | None,
        context: AttentionContext | None = None,
        *,
        rope: Rope = (),
    ) -> torch.Tensor:
        h = torch.cat((x.transpose(1, 2), conditions), dim=2)  # (B, T, 4 * bands)
        [shifts] = modulation
        blocks = zip(self.blocks(), shifts, strict=True)
        skips: list[torch.Tensor] = []
        for block, shift in islice(blocks, len(self.down_blocks)):
            skips.append(block(h, shift, bias, context))
            h = block[2](skips[-1])
        for block, shift in islice(blocks, len(self.mid_blocks)):
            h = block(h, shift, bias, context)
        for block, shift in blocks:
            skip = skips.pop()
            # An odd number of frames was rounded up on the way down.
            h = torch.cat((h[:, : skip.shape[1]], skip), dim=-1)
            h = block[2](block(h, shift, bias, context))
        return self.final_proj(self.final_block(h).transpose(1, 2))


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

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class _Resampling(nn.Module):
    """Convolution that halves the frames of (B, T, channels), rounded up, or doubles them."""

    def __init__(self, conv: nn.Conv1d | nn.ConvTranspose1d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)
