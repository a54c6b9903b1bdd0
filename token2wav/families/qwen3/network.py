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
import torch.nn.functional as F
from torch import nn

from token2wav.families.qwen3.config import DecoderSizes
from token2wav.networks.codebooks import Quantizer
from token2wav.networks.snake import Snake
from token2wav.networks.streaming import (
    OFFLINE,
    StreamConvTranspose,
    StreamStep,
    VocoderNetwork,
    causal_conv,
)
from token2wav.networks.window_transformer import TransformerSizes, WindowTransformer

_DILATIONS = (1, 3, 9)  # of the residual units after each upsampling
_NORM_EPS = 1e-6  # of the ConvNeXt blocks


class Qwen3Decoder(VocoderNetwork):
    """Decoder from codes to audio.

    Args:
        sizes: sizes of the decoder.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.bands, self.frame_samples = sizes.num_quantizers, sizes.frame_samples
        self.output_delay = self.missing_samples = sizes.missing_samples
        self.front = MeanEmbedding(sizes) if sizes.is_omni else ProjectedCodes(sizes)
        self.pre_transformer = Transformer(sizes)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [
                    StreamConvTranspose(sizes.latents, sizes.latents, ratio, ratio, cut="end"),
                    ConvNeXt(sizes.latents),
                ]
            )
            for ratio in sizes.upsampling_ratios
        )
        self.decoder = decoder_layers(sizes)

    def freeze(self) -> None:
        super().freeze()
        for module in self.modules():
            if isinstance(module, Snake):
                module.freeze()

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio of codes (B, codebooks, T), which are whole numbers in float32.

        Returns:
            (B, 1, frame_samples * T) audio of a step, late by `missing_samples`. A whole sequence
            is shorter by these samples.
        """
        x = self.pre_transformer(self.front(codes, step), step)
        for pair in self.upsample:
            for layer in pair:  # type: ignore[attr-defined]
                x = layer(x, step)
        first, *blocks, activation, last = self.decoder
        x = first(x, step)
        for block in blocks:
            x = block(x, step)
        return last(x, step, activation).clamp(-1.0, 1.0)


class ProjectedCodes(nn.Module):
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
        return self.code_embedding(codes.long() + first).mean(1)


class Transformer(nn.Module):
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
            lambda: FeedForward(sizes.hidden_size, sizes.intermediate_size),
        )
        self.norm = norm(sizes.hidden_size)
        self.input_proj: nn.Linear | None = None
        self.output_proj: nn.Linear | None = None
        if not sizes.is_omni:
            self.input_proj = nn.Linear(sizes.latents, sizes.hidden_size)
            self.output_proj = nn.Linear(sizes.hidden_size, sizes.latents)

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Computes x (B, T, latents) to (B, latents, T)."""
        x = x if self.input_proj is None else self.input_proj(x)
        x = self.norm(self.window(x, step))
        x = x if self.output_proj is None else self.output_proj(x)
        return x.transpose(1, 2)


class FeedForward(nn.Module):
    """Feed-forward part of a layer, with a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ConvNeXt(nn.Module):
    """ConvNeXt block: a convolution of every channel, and a feed-forward part, added to the input.

    Args:
        channels: channels of input and output.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = causal_conv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=_NORM_EPS)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        h = self.norm(self.dwconv(x, step).transpose(1, 2))
        h = self.pwconv2(F.gelu(self.pwconv1(h)))
        return x + (self.gamma * h).transpose(1, 2)


def decoder_layers(sizes: DecoderSizes) -> nn.ModuleList:
    """Makes the layers of the decoder: a convolution, upsampling blocks, an activation, and a
    convolution.
    """
    channels, delay = sizes.decoder_dim, 0
    layers: list[nn.Module] = [causal_conv(sizes.latents, channels, 7)]
    for rate in sizes.upsample_rates:
        block = UpsamplingBlock(
            channels, rate, "both" if sizes.is_omni else "end", input_delay=delay
        )
        layers.append(block)
        channels, delay = channels // 2, block.output_delay
    layers.append(_snake(channels))
    layers.append(causal_conv(channels, 1, 7, input_delay=delay))
    return nn.ModuleList(layers)


class UpsamplingBlock(nn.Module):
    """Activation, upsampling to half of the channels, and residual units with growing dilations.

    Args:
        channels: channels of the input.
        rate: factor of upsampling.
        cut: outputs that the upsampling drops, see `StreamConvTranspose`.
        input_delay: delay of the input of a step, in positions.

    Attributes:
        output_delay: delay of the output of a step, in positions.
    """

    def __init__(
        self, channels: int, rate: int, cut: Literal["end", "both"], *, input_delay: int
    ) -> None:
        super().__init__()
        up = StreamConvTranspose(
            channels, channels // 2, 2 * rate, rate, cut=cut, input_delay=input_delay
        )
        self.output_delay = up.output_delay
        units = (
            ResidualUnit(channels // 2, dilation, input_delay=self.output_delay)
            for dilation in _DILATIONS
        )
        self.block = nn.ModuleList([_snake(channels), up, *units])

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        activation, up, *units = self.block
        x = up(activation(x), step)
        for unit in units:
            x = unit(x, step)
        return x


class ResidualUnit(nn.Module):
    """Two causal convolutions, each after an activation, added to the input.

    Args:
        channels: channels of input and output.
        dilation: dilation of the first convolution.
        input_delay: delay of the input of a step, in positions.
    """

    def __init__(self, channels: int, dilation: int, *, input_delay: int) -> None:
        super().__init__()
        self.act1, self.act2 = _snake(channels), _snake(channels)
        self.conv1 = causal_conv(channels, channels, 7, dilation=dilation, input_delay=input_delay)
        self.conv2 = causal_conv(channels, channels, 1, input_delay=input_delay)

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        return x + self.conv2(self.conv1(x, step, self.act1), step, self.act2)


def _snake(channels: int) -> Snake:
    return Snake(channels, beta=True, log_scale=True)
