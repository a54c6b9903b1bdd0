"""Decoder of Qwen3-TTS's tokenizer and of Qwen3-Omni: codes are embedded, a causal transformer with
a sliding window reads them, and causal convolutions upsample its output to audio.

Both models have the same layers after different front ends. They also differ in the edges of the
upsampling in the decoder: Qwen3-Omni drops outputs at the start too.

Modules have the names of the published weights, without the names of wrappers.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import nn

from token2wav.families.qwen3 import DecoderSizes
from token2wav.layers.codebooks import Quantizer
from token2wav.layers.combine import Chain, Residual, placed
from token2wav.layers.convnext import ConvNeXt
from token2wav.layers.feed_forward import GatedFeedForward
from token2wav.layers.snake import Snake
from token2wav.layers.streaming import (
    OFFLINE,
    ON_TIME,
    StreamConvTranspose,
    StreamModule,
    StreamStep,
    Timing,
    WaveformNetwork,
    causal_conv,
)
from token2wav.layers.window_transformer import TransformerSizes, WindowTransformer

_DILATIONS = (1, 3, 9)  # of the residual units after each upsampling


class Qwen3Decoder(WaveformNetwork):
    """Decoder from codes to audio."""

    input_dtype = torch.int32

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_channels, self.frame_samples = sizes.num_quantizers, sizes.frame_samples
        self.front = MeanEmbedding(sizes) if sizes.is_omni else ProjectedCodes(sizes)
        self.pre_transformer = Transformer(sizes)
        self.upsample = Chain(
            Chain(
                [
                    StreamConvTranspose(sizes.latents, sizes.latents, ratio, ratio, cut="end"),
                    ConvNeXt(sizes.latents),
                ]
            )
            for ratio in sizes.upsampling_ratios
        )
        self.decoder = decoder_layers(sizes)
        self.output = placed((self.front, self.pre_transformer, self.upsample, self.decoder))

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        x = self.pre_transformer(self.front(codes, step), step)
        return self.decoder(self.upsample(x, step), step).clamp(-1.0, 1.0)


class ProjectedCodes(StreamModule):
    """Front end of the tokenizer: a semantic codebook and acoustic ones, and a convolution."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        assert sizes.codebook_dim is not None
        self.quantizer = Quantizer(
            sizes.num_quantizers,
            1,
            sizes.codebook_size,
            sizes.codebook_dim // 2,
            sizes.codebook_dim,
            projected=True,
        )
        self.pre_conv = causal_conv(sizes.codebook_dim, sizes.latents, 3)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        return self.pre_conv.place(timing)

    def forward(self, codes: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Converts codes (B, codebooks, T) to (B, T, latent_dim)."""
        return self.pre_conv(self.quantizer(codes), step).transpose(1, 2)


class MeanEmbedding(nn.Module):
    """Front end of Qwen3-Omni: the mean of the embeddings of the codes of a frame, all from one
    table.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self._size = sizes.codebook_size
        self.code_embedding = nn.Embedding(
            sizes.num_quantizers * sizes.codebook_size, sizes.hidden_size
        )

    def forward(self, codes: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Converts codes (B, codebooks, T) to (B, T, hidden_size)."""
        first = self._size * torch.arange(codes.shape[1], device=codes.device)[:, None]
        return self.code_embedding(codes + first).mean(1)


class Transformer(StreamModule):
    """Causal transformer with a sliding window, in Qwen3-TTS between two projections."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, eps=sizes.rms_norm_eps)
        self.window = WindowTransformer(
            TransformerSizes(
                sizes.num_hidden_layers,
                sizes.hidden_size,
                sizes.num_attention_heads,
                sizes.dim_head,
                sizes.sliding_window,
                sizes.rope_theta,
            ),
            norm,
            lambda: GatedFeedForward(sizes.hidden_size, sizes.intermediate_size),
        )
        self.norm = norm(sizes.hidden_size)
        self.input_proj: nn.Linear | None = None
        self.output_proj: nn.Linear | None = None
        if not sizes.is_omni:
            self.input_proj = nn.Linear(sizes.latents, sizes.hidden_size)
            self.output_proj = nn.Linear(sizes.hidden_size, sizes.latents)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        return self.window.place(timing)

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Computes x (B, T, latents) to (B, latents, T)."""
        x = x if self.input_proj is None else self.input_proj(x)
        x = self.norm(self.window(x, step))
        x = x if self.output_proj is None else self.output_proj(x)
        return x.transpose(1, 2)


def decoder_layers(sizes: DecoderSizes) -> Chain:
    """Makes the layers of the decoder: a convolution, upsampling blocks, an activation, and a
    convolution.
    """
    channels = sizes.decoder_dim
    layers: list[nn.Module] = [causal_conv(sizes.latents, channels, 7)]
    for rate in sizes.upsample_rates:
        half = channels // 2
        cut: Literal["both", "end"] = "both" if sizes.is_omni else "end"
        up = StreamConvTranspose(channels, half, 2 * rate, rate, cut=cut)
        units = (_residual_unit(half, dilation) for dilation in _DILATIONS)
        layers.append(Chain({"block": Chain([_snake(channels), up, *units])}))
        channels = half
    return Chain([*layers, _snake(channels), causal_conv(channels, 1, 7)])


def _residual_unit(channels: int, dilation: int) -> Residual:
    return Residual(
        channels,
        {
            "act1": _snake(channels),
            "conv1": causal_conv(channels, channels, 7, dilation=dilation),
            "act2": _snake(channels),
            "conv2": causal_conv(channels, channels, 1),
        },
    )


def _snake(channels: int) -> Snake:
    return Snake(channels, beta=True, log_scale=True)
