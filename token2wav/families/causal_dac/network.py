"""Decoder of the causal DAC."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from token2wav.families.causal_dac import CausalDacSizes
from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.combine import Chain, placed
from token2wav.layers.convnext import ConvNeXt
from token2wav.layers.convolutions import StreamConvTranspose
from token2wav.layers.feed_forward import GatedFeedForward
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.layers.window_transformer import TransformerSizes, WindowTransformer
from token2wav.networks.symmetric_decoder import SymmetricDecoder, Variant
from token2wav.networks.waveform_network import WaveformNetwork

_ROPE_BASE, _NORM_EPS = 10_000.0, 1e-5


class CausalDac(WaveformNetwork):
    """Decoder of the causal DAC, from codes to audio."""

    input_dtype = torch.int32

    def __init__(self, sizes: CausalDacSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.num_codebooks, sizes.frame_samples
        width, dim = sizes.codec_latent_dim, sizes.codec_codebook_dim
        self.semantic_quantizer = ProjectedCodebooks(1, sizes.codebook_size, dim, width)
        self.quantizer = ProjectedCodebooks(
            sizes.num_codebooks - 1, sizes.codec_residual_codebook_size, dim, width
        )
        norm = partial(nn.RMSNorm, eps=_NORM_EPS)
        self.post_module = WindowTransformer(
            TransformerSizes(
                sizes.codec_post_n_layer,
                width,
                sizes.codec_post_n_head,
                sizes.codec_head_dim,
                sizes.codec_window_size,
                _ROPE_BASE,
                key_heads=sizes.codec_post_n_local_heads,
                rope_precision=torch.bfloat16,  # of the table in the public code
            ),
            norm,
            lambda: GatedFeedForward(
                width, sizes.codec_post_intermediate_size, names=("w1", "w3", "w2")
            ),
        )
        self.norm = norm(width)
        self.upsample = Chain(
            Chain([StreamConvTranspose(width, width, factor, factor, cut="end"), ConvNeXt(width)])
            for factor in sizes.codec_downsample_factor[::-1]
        )
        self.decoder = SymmetricDecoder(sizes.decoder, Variant(causal=True, whole_frames=True))
        self.output = placed((self.post_module, self.upsample, self.decoder))

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        x = self.semantic_quantizer(codes[:, :1]) + self.quantizer(codes[:, 1:])
        x = self.norm(self.post_module(x.transpose(1, 2), step)).transpose(1, 2)
        return torch.tanh(self.decoder(self.upsample(x, step), step))
