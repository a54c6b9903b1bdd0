"""Decoder of WavTokenizer."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.windows import ONE_PART
from token2wav.families.wavtokenizer import WavTokenizerSizes
from token2wav.layers.codebooks import Codebooks
from token2wav.networks.vocos import AttentionBlock, ResidualBlock, Vocos, group_norm
from token2wav.networks.waveform_network import WindowNetwork

_EPS = 1e-6


class WavTokenizerDecoder(WindowNetwork):
    """Decoder from codes to audio: attention between convolutions, and Vocos. The norms of the
    convolutions average over all positions of a window.
    """

    input_dtype, whole = torch.int32, ONE_PART

    def __init__(self, sizes: WavTokenizerSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.num_quantizers, sizes.frame_samples
        channels, width = sizes.input_channels, sizes.dim
        self.quantizer = Codebooks(
            sizes.num_quantizers, sizes.codebook_size, channels, channels, projected=False
        )
        self.vocos = Vocos(
            channels,
            width,
            sizes.intermediate_dim,
            sizes.num_layers,
            sizes.n_fft,
            sizes.hop_length,
            pos_net=nn.Sequential(
                *(ResidualBlock(width), ResidualBlock(width), AttentionBlock(width)),
                *(ResidualBlock(width), ResidualBlock(width), group_norm(width)),
            ),
            norm=partial(BandwidthNorm, sizes.adanorm_num_embeddings),
        )

    def forward(self, frames: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.vocos(self.quantizer(frames))


class BandwidthNorm(nn.Module):
    """Layer norm with a scale and a shift for each bandwidth of the encoder. All bandwidths of the
    published models are equal, and their authors use the first.
    """

    def __init__(self, bandwidths: int, width: int) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Embedding(bandwidths, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.scale.weight[0], self.shift.weight[0], _EPS)
