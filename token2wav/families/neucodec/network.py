"""Decoder of NeuCodec and X-Codec 2."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.windows import ONE_PART
from token2wav.families.neucodec import NeuCodecSizes
from token2wav.layers.convolutions import centred_conv
from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.full_attention import FullAttention, FullTransformerLayer
from token2wav.layers.inverse_stft import MOST_MAGNITUDE, InverseSTFT
from token2wav.layers.scalar_codes import ScalarCodes
from token2wav.networks.vocos import ResidualBlock
from token2wav.networks.waveform_network import WindowNetwork

_EPS = 1e-6


class NeuCodecDecoder(WindowNetwork):
    """Decoder from codes to audio: convolutions, a transformer without positions, convolutions, and
    an inverse STFT. The norms of the convolutions average over all positions of a window.

    Modules have the names of the published weights.
    """

    input_channels, input_dtype, whole = 1, torch.int32, ONE_PART

    def __init__(self, sizes: NeuCodecSizes) -> None:
        super().__init__()
        self.frame_samples, width = sizes.frame_samples, sizes.hidden_size
        self.codes = ScalarCodes(sizes.quantization_levels)
        self.project_out = nn.Linear(len(sizes.quantization_levels), sizes.quantization_dim)
        self.fc = nn.Linear(sizes.quantization_dim, width)
        self.embed = centred_conv(width, width, 7)
        self.prior_net, self.post_net = (
            nn.Sequential(ResidualBlock(width), ResidualBlock(width)) for _ in range(2)
        )
        self.layers = nn.Sequential(*(_layer(sizes) for _ in range(sizes.num_hidden_layers)))
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.istft = InverseSTFT(4 * self.frame_samples, self.frame_samples)
        self.head = nn.Linear(width, 4 * self.frame_samples + 2)

    def forward(self, frames: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.fc(self.project_out(self.codes(frames).transpose(1, 2))).transpose(1, 2)
        x = self.layers(self.prior_net(self.embed(x)).transpose(1, 2))
        x = self.post_net(x.transpose(1, 2)).transpose(1, 2)
        return self.istft.of_polar(self.head(self.norm(x)).transpose(1, 2), most=MOST_MAGNITUDE)


def _layer(sizes: NeuCodecSizes) -> FullTransformerLayer:
    width = sizes.hidden_size
    return FullTransformerLayer(
        FullAttention(width, sizes.num_attention_heads, sizes.head_dim),
        FeedForward(width, sizes.intermediate_size, F.silu),
        partial(nn.RMSNorm, width, sizes.rms_norm_eps),
    )
