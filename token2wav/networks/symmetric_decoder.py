"""Symmetric decoder of DAC, SNAC and Higgs Audio: upsampling with Snake, and convolutions that read
as far ahead as they read back. In the decoders of VoxCPM and of the causal DAC they are causal.

Modules have the names of the published weights of DAC in the format of `transformers`.
"""

from __future__ import annotations

import torch
from torch import nn

from token2wav.layers.combine import Chain, Residual
from token2wav.layers.position_noise import PositionNoise
from token2wav.layers.snake import Snake
from token2wav.layers.streaming import (
    StreamConvTranspose,
    Streaming,
    causal_conv,
    centred_conv,
)
from token2wav.published.codec_sizes import SymmetricSizes

KERNEL = 7  # of the first and the last convolution, and of the residual units
DILATIONS = (1, 3, 9)  # of the residual units after each upsampling


class SymmetricDecoder(Chain):
    """Decoder from latents to audio.

    Args:
        whole_frames: whether every frame has all its samples. If not, an upsampling by an odd
            factor returns one output less, as in DAC.
        depthwise: whether the convolutions with a kernel of more than one position, except the
            last, filter every channel by itself.
        attention: layer before the first upsampling; None for no such layer.
        causal: whether no convolution reads ahead. Every frame then has all its samples.
        scaled: whether every channel has a scale and a bias before each upsampling.
    """

    def __init__(
        self,
        sizes: SymmetricSizes,
        *,
        whole_frames: bool = False,
        depthwise: bool = False,
        noise: bool = False,
        attention: Streaming | None = None,
        causal: bool = False,
        scaled: bool = False,
    ) -> None:
        latents, channels = sizes.latents, sizes.decoder_hidden_size
        layers: dict[str, nn.Module] = {}
        conv = causal_conv if causal else centred_conv
        if depthwise:
            layers["conv0"] = conv(latents, latents, KERNEL, groups=latents)
            layers["conv1"] = causal_conv(latents, channels, 1)
        else:
            layers["conv1"] = conv(latents, channels, KERNEL)
        if attention is not None:
            layers["attention"] = attention
        layers["block"] = Chain(
            UpsamplingBlock(
                channels >> number,
                rate,
                whole_frames=whole_frames,
                depthwise=depthwise,
                noise_seed=number if noise else None,
                causal=causal,
                scaled=scaled,
            )
            for number, rate in enumerate(sizes.rates)
        )
        channels >>= len(sizes.rates)
        super().__init__(layers | {"snake1": _snake(channels), "conv2": conv(channels, 1, KERNEL)})


class UpsamplingBlock(Chain):
    """Activation, upsampling to half of the channels, noise if the model has it, and residual units
    with growing dilations.

    Args:
        noise_seed: seed of the noise; None for no noise.
    """

    def __init__(
        self,
        channels: int,
        rate: int,
        *,
        whole_frames: bool,
        depthwise: bool,
        noise_seed: int | None,
        causal: bool,
        scaled: bool,
    ) -> None:
        half, start = channels // 2, 0 if causal else (rate + 1) // 2
        cut = (start, rate - start if whole_frames or causal else start)
        layers: dict[str, nn.Module] = {"scale": ChannelScale(channels)} if scaled else {}
        layers |= {
            "snake1": _snake(channels),
            "conv_t1": StreamConvTranspose(channels, half, 2 * rate, rate, cut=cut),
        }
        if noise_seed is not None:
            layers["noise"] = PositionNoise(half, seed=noise_seed)
        for number, dilation in enumerate(DILATIONS, 1):
            layers[f"res_unit{number}"] = _residual_unit(half, dilation, depthwise, causal)
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


def _residual_unit(channels: int, dilation: int, depthwise: bool, causal: bool) -> Residual:
    groups = channels if depthwise else 1
    conv = causal_conv if causal else centred_conv
    return Residual(
        channels,
        {
            "snake1": _snake(channels),
            "conv1": conv(channels, channels, KERNEL, dilation=dilation, groups=groups),
            "snake2": _snake(channels),
            "conv2": causal_conv(channels, channels, 1),
        },
    )


def _snake(channels: int) -> Snake:
    return Snake(channels, beta=False, log_scale=False)
