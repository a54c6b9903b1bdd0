"""BigVGAN v1 and v2: mel to audio by transposed convolutions and blocks of periodic activations.

Modules and parameters have the names of public `generator` checkpoints. Weight norm is folded into
plain weights when they are read (`flow_weights.py`). Paper: "BigVGAN: A Universal
Neural Vocoder with Large-Scale Training". The periodic activation makes harmonics above half the
sample rate, which would fold back into the audible range. So activations are computed at twice the
rate, between two low-pass filters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from token2wav.layers.combine import Mean, placed, run
from token2wav.layers.convolutions import (
    Overlap,
    StreamConvTranspose,
    Window,
    centred_conv,
    for_cudnn,
)
from token2wav.layers.snake import Snake
from token2wav.layers.streaming import (
    OFFLINE,
    ON_TIME,
    Delay,
    Streaming,
    StreamModule,
    StreamStep,
    Timing,
)
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.published.sizes import BigVGANConfig

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
    """Low-pass filter. Checkpoints have one for each use."""

    filter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", torch.tensor(kaiser_sinc())[None, None])  # (1, 1, taps)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the filter as weights (C, 1, taps) of a convolution that filters every channel of
        x (B, C, T).
        """
        return self.filter.expand(x.shape[1], -1, -1)


class Upsample(LowPass, StreamModule):
    """Upsampling by two, (B, C, T) to (B, C, 2 T). Edges are padded with their last value."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        pad = FILTER_TAPS // RATIO - 1
        cut = pad * RATIO + (FILTER_TAPS - RATIO) // 2
        self.overlap = Overlap(channels, FILTER_TAPS, RATIO, cut=cut, pad=pad)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        x = for_cudnn(self.overlap.with_context(x, step, channels_last=False))
        y = F.conv_transpose1d(x, RATIO * self.of(x), stride=RATIO, groups=x.shape[1])
        return self.overlap.complete_outputs(y, x.shape[2], step)


class Downsample(Streaming):
    """Downsampling by two, (B, C, 2 T) to (B, C, T)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.window = Window(FILTER_TAPS // 2 - 1, FILTER_TAPS // 2, FILTER_TAPS, RATIO)
        self.lowpass = LowPass()

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.input, self.output = timing, self.window.output(timing)
        self.state_shape = (self.channels, self.window.kept(timing))
        return self.output

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        x = step.with_context(self, x, self.window.left, self.window.right, "replicate")
        return F.conv1d(for_cudnn(x), self.lowpass.of(x), stride=RATIO, groups=x.shape[1])


class AntiAliased(StreamModule):
    """Snake activation at twice the rate, (B, C, T) to (B, C, T).

    Attributes:
        kernel: function that computes the activation of a frozen layer in one launch, with the
            arguments of `anti_aliased` in kernels/anti_aliased.py; None for operators of torch.
    """

    kernel: Callable[..., torch.Tensor] | None = None

    def __init__(self, activation: Snake) -> None:
        super().__init__()
        self.act = activation
        channels = len(activation.alpha)
        self.upsample, self.downsample = Upsample(channels), Downsample(channels)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        if self.kernel is None:
            return self.downsample(self.act(self.upsample(x, step)), step)
        overlap = self.upsample.overlap
        filters = self.upsample.filter, self.downsample.lowpass.filter
        coefficients = self.act.frequency, self.act.inverse
        if step.state is None:
            return self.kernel(x, filters, coefficients)
        return self.kernel(
            x,
            filters,
            coefficients,
            (step.state[overlap], step.state[self.downsample]),
            step.span(overlap, x.shape[2]),
            first=step.first,
            last=step.frames_past_end > 0,
        )


class ResBlock(StreamModule):
    """Residual block. For each dilation it adds to its input: activation and dilated convolution,
    and with `resblock: "1"` a second pair without dilation.

    Args:
        dilations: dilations of the first convolution of each pair.
        config: selects the activation, and whether there are pairs.
    """

    def __init__(
        self, channels: int, kernel: int, dilations: tuple[int, ...], config: BigVGANConfig
    ) -> None:
        super().__init__()
        self.activations, self.waits = nn.ModuleList(), nn.ModuleList()
        columns: list[list[nn.Module]] = []
        self._branches: list[tuple[list[nn.Module], Delay]] = []
        for dilation in dilations:
            values = (dilation, 1) if config.resblock == "1" else (dilation,)
            convs = [centred_conv(channels, channels, kernel, dilation=value) for value in values]
            activations = [_activation(channels, config) for _ in values]
            pairs = zip(activations, convs, strict=True)
            layers: list[nn.Module] = [layer for pair in pairs for layer in pair]
            wait = Delay(channels)
            self.activations.extend(activations)
            self.waits.append(wait)
            columns.append(list(convs))
            self._branches.append((layers, wait))
        # names in checkpoints
        names = ("convs1", "convs2") if config.resblock == "1" else ("convs",)
        for name, column in zip(names, zip(*columns, strict=True), strict=True):
            self.add_module(name, nn.ModuleList(column))

    def place(self, timing: Timing = ON_TIME) -> Timing:
        for layers, wait in self._branches:
            output = placed(layers, timing)
            wait.align(timing, output)
            timing = output
        return timing

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        for layers, wait in self._branches:
            x = wait(x, step) + run(layers, x, step)
        return x


def _activation(channels: int, config: BigVGANConfig) -> AntiAliased:
    snake = Snake(channels, beta=config.activation == "snakebeta", log_scale=config.snake_logscale)
    return AntiAliased(snake)


class BigVGAN(WaveformNetwork):
    """BigVGAN vocoder, for whole utterances and for streams."""

    def __init__(self, config: BigVGANConfig) -> None:
        super().__init__()
        self.config = config
        self.input_channels, self.frame_samples = config.num_mels, config.hop_size
        channels = config.upsample_initial_channel
        self.conv_pre = centred_conv(config.num_mels, channels, _EDGE_KERNEL)
        self.ups, self.resblocks, self.waits = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self._stages: list[tuple[StreamConvTranspose, Mean]] = []
        for kernel, rate in zip(config.upsample_kernel_sizes, config.upsample_rates, strict=True):
            up = StreamConvTranspose(channels, channels // 2, kernel, rate)
            self.ups.append(nn.ModuleList([up]))  # checkpoints have a list of one for each stage
            channels //= 2
            shapes = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
            blocks = [ResBlock(channels, *shape, config) for shape in shapes]
            waits = [Delay(channels) for _ in blocks]
            self.resblocks.extend(blocks)
            self.waits.extend(waits)
            self._stages.append((up, Mean(blocks, waits)))
        self.activation_post = _activation(channels, config)
        self.conv_post = centred_conv(channels, 1, _EDGE_KERNEL, bias=config.use_bias_at_final)
        timing = self.conv_pre.place()
        for up, mean in self._stages:
            timing = mean.place(up.place(timing))
        self.output = placed((self.activation_post, self.conv_post), timing)

    def forward(self, mel: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes audio (B, 1, frames * hop_size), between -1 and 1, from mel (B, bands, frames).

        In a stream the audio is late by `output_delay`.
        """
        x = self.conv_pre(mel, step)
        for up, mean in self._stages:
            x = mean(up(x, step), step)
        audio = self.conv_post(self.activation_post(x, step), step)
        return audio.tanh() if self.config.use_tanh_at_final else audio.clamp(-1, 1)
