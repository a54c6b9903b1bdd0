"""BigVGAN v1 and v2: mel to audio by transposed convolutions and blocks of periodic activations.

Modules and parameters have the names of public `generator` checkpoints. Weight norm is folded into
plain weights when they are read (`families/bigvgan/weights.py`). Paper: "BigVGAN: A Universal
Neural Vocoder with Large-Scale Training". The periodic activation makes harmonics above half the
sample rate, which would fold back into the audible range. So activations are computed at twice the
rate, between two low-pass filters.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from token2wav.families.bigvgan.config import BigVGANConfig
from token2wav.networks.snake import Snake
from token2wav.networks.streaming import (
    OFFLINE,
    Delay,
    Overlap,
    StreamConvTranspose,
    Streaming,
    StreamStep,
    VocoderNetwork,
    centred_conv,
    strided_delay,
)

FILTER_TAPS = 12
RATIO = 2
_HALF_WIDTH = 0.3  # half width of the transition band, in cycles per sample
_EDGE_KERNEL = 7  # kernel of the first and the last convolution; no file has it


def kaiser_sinc() -> list[float]:
    """Computes a low-pass filter at half the band: a sinc under a Kaiser window, with `FILTER_TAPS`
    taps that add up to one.
    """
    attenuation_db = 2.285 * (FILTER_TAPS // 2 - 1) * math.pi * 4 * _HALF_WIDTH + 7.95
    # Kaiser's rule for an attenuation above 50 dB; here it is 51 dB.
    window = np.kaiser(FILTER_TAPS, 0.1102 * (attenuation_db - 8.7))
    time = np.arange(FILTER_TAPS) - (FILTER_TAPS - 1) / 2
    taps = window * np.sinc(time / RATIO)
    return [float(tap) for tap in taps / taps.sum()]


class LowPass(nn.Module):
    """Low-pass filter. Checkpoints have one for each place where it is used."""

    filter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", torch.tensor(kaiser_sinc())[None, None])  # (1, 1, taps)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the filter as weights (C, 1, taps) of a convolution that filters every channel of
        x (B, C, T).
        """
        return self.filter.expand(x.shape[1], -1, -1)


class Upsample(LowPass):
    """Upsampling by two, (B, C, T) to (B, C, 2 T). Edges are padded with their last value."""

    def __init__(self, channels: int, input_delay: int) -> None:
        super().__init__()
        pad = FILTER_TAPS // RATIO - 1
        cut = pad * RATIO + (FILTER_TAPS - RATIO) // 2
        self.overlap = Overlap(
            channels, FILTER_TAPS, RATIO, cut=cut, pad=pad, input_delay=input_delay
        )

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        x = self.overlap.with_context(x, step)
        y = F.conv_transpose1d(x, RATIO * self.of(x), stride=RATIO, groups=x.shape[1])
        return self.overlap.complete_outputs(y, x.shape[2], step)


class Downsample(Streaming):
    """Downsampling by two, (B, C, 2 T) to (B, C, T)."""

    def __init__(self, channels: int, input_delay: int) -> None:
        super().__init__()
        self.left, self.right, self.input_delay = (
            FILTER_TAPS // 2 - 1,
            FILTER_TAPS // 2,
            input_delay,
        )
        self.state_shape = (channels, self.left - input_delay + RATIO * self.output_delay)
        self.lowpass = LowPass()

    @property
    def output_delay(self) -> int:
        return strided_delay(self.left - self.input_delay, FILTER_TAPS, RATIO)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        x = step.with_context(self, x, self.left, self.right, "replicate")
        return F.conv1d(x, self.lowpass.of(x), stride=RATIO, groups=x.shape[1])


class AntiAliased(nn.Module):
    """Snake activation at twice the rate, (B, C, T) to (B, C, T)."""

    def __init__(self, activation: Snake, *, input_delay: int = 0) -> None:
        super().__init__()
        self.act = activation
        channels = len(activation.alpha)
        self.upsample = Upsample(channels, input_delay)
        self.downsample = Downsample(channels, self.upsample.overlap.output_delay)

    @property
    def output_delay(self) -> int:
        """Delay of the output in positions."""
        return self.downsample.output_delay

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return self.downsample(self.act(self.upsample(x, step)), step)


class ResBlock(nn.Module):
    """Residual block. For each dilation it adds to its input: activation and dilated convolution,
    and with `resblock: "1"` a second pair without dilation.

    Args:
        channels: channels of input and output.
        kernel: kernel of all convolutions.
        dilations: dilations of the first convolution of each pair.
        config: configuration, which selects the activation and whether there are pairs.
        input_delay: delay of the input in positions.

    Attributes:
        output_delay: delay of the output in positions.
    """

    def __init__(
        self,
        channels: int,
        kernel: int,
        dilations: tuple[int, ...],
        config: BigVGANConfig,
        *,
        input_delay: int = 0,
    ) -> None:
        super().__init__()
        self.activations, self.waits = nn.ModuleList(), nn.ModuleList()
        convs: list[list[nn.Module]] = []
        for dilation in dilations:
            start = input_delay
            convs.append([])
            for each in (dilation, 1) if config.resblock == "1" else (dilation,):
                self.activations.append(activation := _activation(channels, config, input_delay))
                conv = centred_conv(
                    channels, channels, kernel, dilation=each, input_delay=activation.output_delay
                )
                convs[-1].append(conv)
                input_delay = conv.output_delay
            self.waits.append(Delay(channels, input_delay - start, input_delay=start))
        self.output_delay = input_delay
        # names in checkpoints
        names = ("convs1", "convs2") if config.resblock == "1" else ("convs",)
        self._convs = names
        for name, column in zip(names, zip(*convs, strict=True), strict=True):
            self.add_module(name, nn.ModuleList(column))

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        activations = iter(self.activations)
        for *convs, wait in zip(
            *(getattr(self, name) for name in self._convs), self.waits, strict=True
        ):
            h = x
            for conv in convs:
                h = conv(next(activations)(h, step), step)
            x = wait(x, step) + h
        return x


def _activation(channels: int, config: BigVGANConfig, input_delay: int) -> AntiAliased:
    snake = Snake(channels, beta=config.activation == "snakebeta", log_scale=config.snake_logscale)
    return AntiAliased(snake, input_delay=input_delay)


class BigVGAN(VocoderNetwork):
    """BigVGAN vocoder, for whole utterances and for streams."""

    def __init__(self, config: BigVGANConfig) -> None:
        super().__init__()
        self.config = config
        self.bands, self.frame_samples = config.num_mels, config.hop_size
        channels = config.upsample_initial_channel
        self.conv_pre = centred_conv(config.num_mels, channels, _EDGE_KERNEL)
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        # delays that give all blocks of a stage the delay of the slowest block
        self.waits = nn.ModuleList()
        delay = self.conv_pre.output_delay
        for kernel, rate in zip(config.upsample_kernel_sizes, config.upsample_rates, strict=True):
            up = StreamConvTranspose(channels, channels // 2, kernel, rate, input_delay=delay)
            self.ups.append(nn.ModuleList([up]))  # checkpoints have a list of one for each stage
            channels //= 2
            shapes = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
            blocks = [
                ResBlock(channels, *shape, config, input_delay=up.output_delay) for shape in shapes
            ]
            delay = max(block.output_delay for block in blocks)
            self.resblocks.extend(blocks)
            self.waits.extend(
                Delay(channels, delay - block.output_delay, input_delay=block.output_delay)
                for block in blocks
            )
        self.activation_post = _activation(channels, config, delay)
        delay = self.activation_post.output_delay
        self.conv_post = centred_conv(
            channels, 1, _EDGE_KERNEL, input_delay=delay, bias=config.use_bias_at_final
        )
        self.output_delay = self.conv_post.output_delay

    def freeze(self) -> None:
        super().freeze()
        for module in self.modules():
            if isinstance(module, Snake):
                module.freeze()

    def forward(self, mel: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes audio (B, 1, frames * hop_size), between -1 and 1, from mel (B, bands, frames).

        In a stream the audio is late by `output_delay`.
        """
        x = self.conv_pre(mel, step)
        width = len(self.config.resblock_kernel_sizes)
        for stage, up in enumerate(self.ups):
            x = up[0](x, step)  # type: ignore[index]
            blocks = list(zip(self.resblocks, self.waits, strict=True))[
                stage * width : (stage + 1) * width
            ]
            total, *others = [wait(block(x, step), step) for block, wait in blocks]
            for other in others:
                total = total + other
            x = total / width
        audio = self.conv_post(self.activation_post(x, step), step)
        return audio.tanh() if self.config.use_tanh_at_final else audio.clamp(-1, 1)
