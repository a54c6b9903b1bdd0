"""Symmetric decoder of DAC, SNAC and Higgs Audio: upsampling with Snake, and convolutions that read
as far ahead as they read back. In the decoders of VoxCPM, of the causal DAC and of Qwen3 they are
causal.

Modules have the names of the published weights of DAC in the format of `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from token2wav.layers.combine import Chain, Residual
from token2wav.layers.convolutions import StreamConv, StreamConvTranspose, causal_conv, centred_conv
from token2wav.layers.position_noise import PositionNoise
from token2wav.layers.snake import Snake
from token2wav.layers.streaming import Streaming
from token2wav.published.codec_sizes import SymmetricSizes

KERNEL = 7  # of the first and the last convolution, and of the residual units
DILATIONS = (1, 3, 9)  # of the residual units after each upsampling


@dataclass(frozen=True)
class Variant:
    """Variant of a symmetric decoder.

    Attributes:
        causal: whether no convolution reads ahead.
        whole_frames: whether every frame has all its samples. If not, an upsampling by an odd
            factor returns one output less, as in DAC; a causal upsampling, those of one input.
        depthwise: whether the convolutions with a kernel of more than one position, except the
            last, filter every channel by itself.
        noise: whether every upsampling is followed by noise.
        scaled: whether every channel has a scale and a bias before each upsampling.
        log_snakes: whether the activations have two parameters, which are logarithms.
    """

    causal: bool = False
    whole_frames: bool = False
    depthwise: bool = False
    noise: bool = False
    scaled: bool = False
    log_snakes: bool = False

    def conv(self, inputs: int, outputs: int, *, dilation: int = 1, groups: int = 1) -> StreamConv:
        make = causal_conv if self.causal else centred_conv
        return make(inputs, outputs, KERNEL, dilation=dilation, groups=groups)

    def up(self, channels: int, rate: int) -> StreamConvTranspose:
        if self.causal:
            cut = (0 if self.whole_frames else rate, rate)
        else:
            start = (rate + 1) // 2
            cut = (start, rate - start if self.whole_frames else start)
        return StreamConvTranspose(channels, channels // 2, 2 * rate, rate, cut=cut)

    def snake(self, channels: int) -> Snake:
        return Snake(channels, beta=self.log_snakes, log_scale=self.log_snakes)

    def residual_unit(self, channels: int, dilation: int) -> Residual:
        groups = channels if self.depthwise else 1
        return Residual(
            channels,
            {
                "snake1": self.snake(channels),
                "conv1": self.conv(channels, channels, dilation=dilation, groups=groups),
                "snake2": self.snake(channels),
                "conv2": causal_conv(channels, channels, 1),
            },
        )


_PLAIN = Variant()


class SymmetricDecoder(Chain):
    """Decoder from latents to audio.

    Args:
        attention: layer before the first upsampling; None for no such layer.
    """

    def __init__(
        self,
        sizes: SymmetricSizes,
        variant: Variant = _PLAIN,
        attention: Streaming | None = None,
    ) -> None:
        latents, channels = sizes.latents, sizes.decoder_hidden_size
        layers: dict[str, nn.Module] = {}
        if variant.depthwise:
            layers["conv0"] = variant.conv(latents, latents, groups=latents)
            layers["conv1"] = causal_conv(latents, channels, 1)
        else:
            layers["conv1"] = variant.conv(latents, channels)
        if attention is not None:
            layers["attention"] = attention
        layers["block"] = Chain(
            UpsamplingBlock(channels >> number, rate, variant, number)
            for number, rate in enumerate(sizes.rates)
        )
        channels >>= len(sizes.rates)
        ends = {"snake1": variant.snake(channels), "conv2": variant.conv(channels, 1)}
        super().__init__(layers | ends)


class UpsamplingBlock(Chain):
    """Activation, upsampling to half of the channels, noise if the model has it, and residual units
    with growing dilations.

    Args:
        number: number of the block, the seed of its noise.
    """

    def __init__(self, channels: int, rate: int, variant: Variant, number: int) -> None:
        layers: dict[str, nn.Module] = {"scale": ChannelScale(channels)} if variant.scaled else {}
        layers |= {"snake1": variant.snake(channels), "conv_t1": variant.up(channels, rate)}
        if variant.noise:
            layers["noise"] = PositionNoise(channels // 2, seed=number)
        for unit, dilation in enumerate(DILATIONS, 1):
            layers[f"res_unit{unit}"] = variant.residual_unit(channels // 2, dilation)
        super().__init__(layers)


class ChannelScale(nn.Module):
    """Scale and bias of every channel of x (B, channels, T)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias[:, None], x, self.weight[:, None])
