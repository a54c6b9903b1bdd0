"""Decoder of Mimi: residual codebooks, a causal transformer with a sliding window, and a causal
SEANet decoder.

Modules have the names of the published weights in the format of `transformers`, without the names
of wrappers.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.families.mimi.config import DecoderSizes, MimiSizes
from token2wav.networks.codebooks import Quantizer
from token2wav.networks.streaming import (
    OFFLINE,
    StreamConvTranspose,
    StreamStep,
    VocoderNetwork,
    causal_conv,
)
from token2wav.networks.window_transformer import TransformerSizes, WindowTransformer


class LatentDecoder(VocoderNetwork):
    """Decoder from latents, vectors of `hidden_size` numbers, to audio.

    Args:
        sizes: sizes of the decoder.
    """

    output_delay = 0

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.heads, self.frame_samples = sizes.num_attention_heads, sizes.frame_samples
        self.upsample = StreamConvTranspose(
            sizes.hidden_size,
            sizes.hidden_size,
            2 * sizes.stride,
            sizes.stride,
            cut="end",
            groups=sizes.upsample_groups,
            bias=False,
        )
        self.decoder_transformer = WindowTransformer(
            TransformerSizes(
                sizes.num_hidden_layers,
                sizes.hidden_size,
                sizes.num_attention_heads,
                sizes.dim_head,
                sizes.sliding_window,
                sizes.rope_theta,
            ),
            partial(nn.LayerNorm, eps=sizes.norm_eps),
            lambda: FeedForward(sizes),
        )
        self.decoder = Decoder(sizes)

    def decode(self, latents: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of latents (B, hidden_size, T)."""
        x = self.upsample(latents, step).transpose(1, 2).contiguous()
        x = self.decoder_transformer(x, step)
        return self.decoder(x.transpose(1, 2), step)  # channels last, see `StreamConv`


class Mimi(LatentDecoder):
    """Decoder of Mimi, from codes to audio.

    Args:
        sizes: sizes of the decoder.
    """

    def __init__(self, sizes: MimiSizes) -> None:
        super().__init__(sizes)
        self.bands = sizes.num_quantizers
        self.quantizer = Quantizer(
            sizes.num_quantizers,
            sizes.num_semantic_quantizers,
            sizes.codebook_size,
            sizes.codebook_dim,
            sizes.hidden_size,
        )

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of codes (B, codebooks, T), which are whole
        numbers in float32, and -1 in codebooks that a stream does not send.
        """
        return self.decode(self.quantizer(codes), step)


class FeedForward(nn.Module):
    """Feed-forward part of a layer."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        width, inner = sizes.hidden_size, sizes.intermediate_size
        self.fc1, self.fc2 = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )
        self._approximate = "none" if sizes.hidden_act == "gelu" else "tanh"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self._approximate))


class Decoder(nn.Module):
    """SEANet decoder. The number of a layer is its name in the published weights, in which an
    activation before each upsampling and before the last convolution has a number too.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        channels = sizes.num_filters << len(sizes.upsampling_ratios)
        self.layers = nn.ModuleDict(
            {"0": causal_conv(sizes.hidden_size, channels, sizes.kernel_size)}
        )
        number = 2
        for ratio in sizes.upsampling_ratios:
            self.layers[str(number)] = StreamConvTranspose(
                channels, channels // 2, 2 * ratio, ratio, cut="end"
            )
            channels //= 2
            for unit in range(sizes.num_residual_layers):
                number += 1
                dilation = sizes.dilation_growth_rate**unit
                self.layers[str(number)] = ResidualUnit(channels, dilation, sizes)
            number += 2
        self.layers[str(number)] = causal_conv(channels, 1, sizes.last_kernel_size)

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        first, *inner, last = self.layers.values()
        x = first(x, step)
        for layer in inner:
            x = layer(x if isinstance(layer, ResidualUnit) else elu(x), step)
        return last(x, step, elu)


class ResidualUnit(nn.Module):
    """Two causal convolutions, each after an activation, added to the input."""

    def __init__(self, channels: int, dilation: int, sizes: DecoderSizes) -> None:
        super().__init__()
        inner, kernel = channels // sizes.compress, sizes.residual_kernel_size
        # The numbers are names in checkpoints, in which the activations have a number too.
        self.block = nn.ModuleDict(
            {
                "1": causal_conv(channels, inner, kernel, dilation=dilation),
                "3": causal_conv(inner, channels, 1),
            }
        )

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        return x + self.block["3"](self.block["1"](x, step, elu), step, elu)


def elu(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the activation ELU."""
    return F.elu(x) if out is None else torch.ops.aten.elu.out(x, out=out)
