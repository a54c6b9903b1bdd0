"""Decoder of NanoCodec: finite scalar quantisation in groups, and a causal HiFi-GAN.

Modules have the names of the published weights, without the names of wrappers.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.families.nanocodec import NanoCodecSizes
from token2wav.layers.combine import Chain, Mean, Residual, placed, run
from token2wav.layers.convolutions import StreamConvTranspose, causal_conv
from token2wav.layers.scalar_codes import ScalarCodes
from token2wav.layers.streaming import (
    OFFLINE,
    ON_TIME,
    Curve,
    Delay,
    FreezableLayer,
    StreamModule,
    StreamStep,
    Timing,
)
from token2wav.networks.waveform_network import WaveformNetwork

_SNAKE_EPS = 1e-9
_LEAKY_SLOPE = 0.01


class NanoCodec(WaveformNetwork):
    """Decoder of NanoCodec, from codes to audio."""

    input_dtype = torch.int32

    def __init__(self, config: NanoCodecSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = config.num_groups, config.frame_samples
        self.codes = ScalarCodes(config.num_levels_per_group)
        channels = config.base_channels
        self.pre_conv = causal_conv(config.input_dim, channels, config.in_kernel_size)
        self.activations, self.up_sample_conv_layers, self.res_layers = (
            nn.ModuleList() for _ in range(3)
        )
        for rate in config.up_sample_rates:
            half = channels // 2
            groups = half if config.n_groups_equal_to_out_channels else 1
            self.activations.append(HalfSnake(channels))
            self.up_sample_conv_layers.append(
                StreamConvTranspose(channels, half, 2 * rate, rate, cut="end", groups=groups)
            )
            self.res_layers.append(ResidualLayer(half, config))
            channels = half
        self.post_activation = HalfSnake(channels)
        self.post_conv = causal_conv(channels, 1, config.out_kernel_size)
        clamped = partial(torch.clamp, min=-1.0, max=1.0)
        self._bounded = torch.tanh if config.output_activation == "tanh" else clamped
        stages = zip(self.activations, self.up_sample_conv_layers, self.res_layers, strict=True)
        inner = [layer for stage in stages for layer in stage]
        self._order = [self.pre_conv, *inner, self.post_activation, self.post_conv]
        self.output = placed(self._order)

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        values = self.codes(codes).to(self.pre_conv.weight.dtype)
        return self._bounded(run(self._order, values, step))


class HalfSnake(FreezableLayer):
    """Snake x + sin²(αx) / α for the first half of the channels, LeakyReLU for the second half.

    Of an odd number, the middle channel belongs to the second half.
    """

    inverse: torch.Tensor | None

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels // 2, 1))
        self.register_buffer("inverse", None, persistent=False)  # filled by `freeze`

    def freeze(self) -> None:
        self.inverse = 1 / (self.alpha.detach() + _SNAKE_EPS)

    @property
    def curve(self) -> Curve:
        return Curve(self.alpha, self.inverse, _LEAKY_SLOPE)

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        half = self.alpha.shape[1]
        sine = torch.sin(x[:, :half] * self.alpha)
        if self.inverse is None:  # in training, which needs operations with a gradient
            curved = torch.addcmul(x[:, :half], sine, sine / (self.alpha + _SNAKE_EPS))
            return torch.cat((curved, F.leaky_relu(x[:, half:], _LEAKY_SLOPE)), dim=1)
        out = torch.empty_like(x) if out is None else out
        torch.addcmul(x[:, :half], sine, sine * self.inverse, out=out[:, :half])
        out[:, half:] = F.leaky_relu(x[:, half:], _LEAKY_SLOPE)
        return out


class ResidualLayer(StreamModule):
    """Mean of parallel residual blocks with kernels of different sizes."""

    def __init__(self, channels: int, config: NanoCodecSizes) -> None:
        super().__init__()
        dilations, kernels = config.resblock_dilation_sizes, config.resblock_kernel_sizes
        self.res_blocks = nn.ModuleList(
            _residual_block(channels, kernel, dilations) for kernel in kernels
        )
        self.waits = nn.ModuleList(Delay(channels) for _ in kernels)
        self._mean = Mean(self.res_blocks, self.waits)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        return self._mean.place(timing)

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        return self._mean(x, step)


def _residual_block(channels: int, kernel: int, dilations: tuple[int, ...]) -> Chain:
    units = (_residual_unit(channels, kernel, dilation) for dilation in dilations)
    return Chain({"res_blocks": Chain(units)})


def _residual_unit(channels: int, kernel: int, dilation: int) -> Residual:
    return Residual(
        channels,
        {
            "input_activation": HalfSnake(channels),
            "input_conv": causal_conv(channels, channels, kernel, dilation=dilation),
            "skip_activation": HalfSnake(channels),
            "skip_conv": causal_conv(channels, channels, kernel),
        },
    )
