"""Decoder of Qwen3-TTS's tokenizer and of Qwen3-Omni: codes are embedded, a causal transformer with
a sliding window reads them, and causal convolutions upsample its output to audio.

The models differ in their embeddings: codebooks and a convolution, or the mean of the entries of
one table. They also differ in the edges of the upsampling in the decoder: Qwen3-Omni drops outputs
at the start too.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from token2wav.families.qwen3 import DecoderSizes
from token2wav.layers.codebooks import MeanEmbedding, Quantizer
from token2wav.layers.combine import Chain, placed
from token2wav.layers.convnext import ConvNeXt
from token2wav.layers.convolutions import StreamConvTranspose, causal_conv
from token2wav.layers.feed_forward import GatedFeedForward
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.layers.window_transformer import (
    ProjectedTransformer,
    TransformerSizes,
    WindowTransformer,
    projection,
)
from token2wav.networks.symmetric_decoder import SymmetricDecoder, Variant
from token2wav.networks.waveform_network import WaveformNetwork


class Qwen3Decoder(WaveformNetwork):
    """Decoder from codes to audio."""

    input_dtype = torch.int32

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.num_quantizers, sizes.frame_samples
        count, size, width = sizes.num_quantizers, sizes.codebook_size, sizes.latents
        self._is_omni = sizes.codebook_dim is None
        if sizes.codebook_dim is None:
            self.code_embedding = MeanEmbedding(count, size, width)
            layers: list[nn.Module] = []
        else:
            dim = sizes.codebook_dim
            self.quantizer = Quantizer(count, 1, size, dim // 2, dim, projected=True)
            self.pre_conv = causal_conv(dim, width, 3)
            layers = [self.pre_conv]
        self.pre_transformer = _transformer(sizes)
        self.upsample = Chain(
            Chain([StreamConvTranspose(width, width, ratio, ratio, cut="end"), ConvNeXt(width)])
            for ratio in sizes.upsampling_ratios
        )
        variant = Variant(causal=True, whole_frames=not self._is_omni, log_snakes=True)
        self.decoder = SymmetricDecoder(sizes.decoder, variant)
        self.output = placed([*layers, self.pre_transformer, self.upsample, self.decoder])

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        if self._is_omni:
            x = self.code_embedding(codes)
        else:
            x = self.pre_conv(self.quantizer(codes), step).transpose(1, 2)
        x = self.pre_transformer(x, step).transpose(1, 2)
        return self.decoder(self.upsample(x, step), step).clamp(-1.0, 1.0)


def _transformer(sizes: DecoderSizes) -> ProjectedTransformer:
    """Makes the transformer, in Qwen3-TTS between two projections."""
    width, norm = sizes.hidden_size, partial(nn.RMSNorm, eps=sizes.rms_norm_eps)
    transformer = WindowTransformer(
        TransformerSizes.of(sizes),
        norm,
        lambda: GatedFeedForward(width, sizes.intermediate_size),
    )
    always = not sizes.is_omni
    return ProjectedTransformer(
        transformer,
        projection(sizes.latents, width, bias=True, always=always),
        projection(width, sizes.latents, bias=True, always=always),
        norm(width),
    )
