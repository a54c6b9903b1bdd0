"""Decoder of DAC: residual codebooks, and symmetric convolutions with Snake.

Modules have the names of the published weights in the format of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from token2wav.families.dac.config import DILATIONS, KERNEL, DacSizes, DecoderSizes, first_cut
from token2wav.networks.codebooks import ProjectedCodebooks
from token2wav.networks.position_noise import PositionNoise
from token2wav.networks.snake import Snake
from token2wav.networks.streaming import (
    OFFLINE,
    Delay,
    StreamConvTranspose,
    Streaming,
    StreamStep,
    VocoderNetwork,
    causal_conv,
    centred_conv,
)


class Dac(VocoderNetwork):
    """Decoder of DAC, from codes to audio.

    Args:
        sizes: sizes of the decoder.
    """

    def __init__(self, sizes: DacSizes) -> None:
        super().__init__()
        self.bands, self.frame_samples = sizes.n_codebooks, sizes.frame_samples
        self.quantizer = ProjectedCodebooks(
            sizes.n_codebooks, sizes.codebook_size, sizes.codebook_dim, sizes.latents
        )
        self.decoder = Decoder(sizes)
        self.output_delay = self.decoder.output_delay
        self.missing_samples = self.decoder.missing_samples

    def freeze(self) -> None:
        super().freeze()
        self.decoder.freeze()

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio of codes (B, codebooks, T), which are whole numbers in float32, and -1
        in codebooks that a stream does not send.

        Returns:
            (B, 1, frame_samples * T) audio of a step, late by `output_delay`. A whole sequence is
            shorter by `missing_samples` samples.
        """
        return torch.tanh(self.decoder(self.quantizer(codes), step))


class Decoder(nn.Module):
    """Decoder from latents to audio, which other codecs share.

    Args:
        sizes: sizes of the decoder.
        whole_frames: whether every frame has all its samples. If not, an upsampling by an odd
            factor returns one output less, as in DAC.
        depthwise: whether the convolutions with a kernel of more than one position, except the
            last, filter every channel by itself.
        noise: whether noise follows every upsampling.
        attention: makes a layer before the first upsampling, from its channels and its input delay;
            None for no such layer.

    Attributes:
        output_delay: delay of the output of a step, in samples.
        missing_samples: number of samples by which the audio is shorter than its frames.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        whole_frames: bool = False,
        depthwise: bool = False,
        noise: bool = False,
        attention: Callable[[int, int], Streaming] | None = None,
    ) -> None:
        super().__init__()
        latents, channels = sizes.latents, sizes.decoder_hidden_size
        self.conv0 = centred_conv(latents, latents, KERNEL, groups=latents) if depthwise else None
        if self.conv0 is None:
            self.conv1 = centred_conv(latents, channels, KERNEL)
        else:
            self.conv1 = causal_conv(latents, channels, 1, input_delay=self.conv0.output_delay)
        delay, extra = self.conv1.output_delay, 0
        self.attention = attention(channels, delay) if attention else None
        if self.attention is not None:
            delay = self.attention.output_delay
        self.block = nn.ModuleList()
        for number, rate in enumerate(sizes.rates):
            block = UpsamplingBlock(
                channels,
                rate,
                whole_frames=whole_frames,
                depthwise=depthwise,
                noise_seed=number if noise else None,
                input_delay=delay,
                extra_inputs=extra,
            )
            self.block.append(block)
            channels, delay, extra = channels // 2, block.output_delay, block.extra_outputs
        self.snake1 = _snake(channels)
        self.conv2 = centred_conv(channels, 1, KERNEL, input_delay=delay, extra_inputs=extra)
        self.output_delay: int = self.conv2.output_delay
        self.missing_samples: int = -extra

    def freeze(self) -> None:
        """Ends loading."""
        for module in self.modules():
            if isinstance(module, Snake | PositionNoise):
                module.freeze()

    def forward(self, latents: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of latents (B, C, T)."""
        x = latents if self.conv0 is None else self.conv0(latents, step)
        x = self.conv1(x, step)
        x = x if self.attention is None else self.attention(x, step)
        for block in self.block:
            x = block(x, step)
        return self.conv2(x, step, self.snake1)


class UpsamplingBlock(nn.Module):
    """Activation, upsampling to half of the channels, noise if the model has it, and residual units
    with growing dilations.

    Args:
        channels: channels of the input.
        rate: factor of upsampling.
        whole_frames, depthwise: see `Decoder`.
        noise_seed: seed of the noise; None for no noise.
        input_delay, extra_inputs: see `Streaming`.

    Attributes:
        output_delay: delay of the output of a step, in positions.
        extra_outputs: see `StreamConvTranspose`.
    """

    def __init__(
        self,
        channels: int,
        rate: int,
        *,
        whole_frames: bool,
        depthwise: bool,
        noise_seed: int | None,
        input_delay: int,
        extra_inputs: int,
    ) -> None:
        super().__init__()
        start = first_cut(rate)
        self.snake1 = _snake(channels)
        self.conv_t1 = StreamConvTranspose(
            channels,
            channels // 2,
            2 * rate,
            rate,
            cut=(start, rate - start if whole_frames else start),
            input_delay=input_delay,
            extra_inputs=extra_inputs,
        )
        delay, self.extra_outputs = self.conv_t1.output_delay, self.conv_t1.extra_outputs
        self.noise = (
            None
            if noise_seed is None
            else PositionNoise(channels // 2, seed=noise_seed, input_delay=delay)
        )
        self.units = [f"res_unit{number}" for number in range(1, 1 + len(DILATIONS))]
        for name, dilation in zip(self.units, DILATIONS, strict=True):
            unit = ResidualUnit(
                channels // 2,
                dilation,
                depthwise=depthwise,
                input_delay=delay,
                extra_inputs=self.extra_outputs,
            )
            self.add_module(name, unit)
            delay = unit.output_delay
        self.output_delay = delay

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        x = self.conv_t1(self.snake1(x), step)
        x = x if self.noise is None else self.noise(x, step)
        for name in self.units:
            x = getattr(self, name)(x, step)
        return x


class ResidualUnit(nn.Module):
    """Two convolutions, each after an activation, added to the input.

    Args:
        channels: channels of input and output.
        dilation: dilation of the first convolution.
        depthwise: see `Decoder`.
        input_delay, extra_inputs: see `Streaming`.

    Attributes:
        output_delay: delay of the output of a step, in positions.
    """

    def __init__(
        self,
        channels: int,
        dilation: int,
        *,
        depthwise: bool,
        input_delay: int,
        extra_inputs: int,
    ) -> None:
        super().__init__()
        self.snake1, self.snake2 = _snake(channels), _snake(channels)
        self.conv1 = centred_conv(
            channels,
            channels,
            KERNEL,
            dilation=dilation,
            groups=channels if depthwise else 1,
            input_delay=input_delay,
            extra_inputs=extra_inputs,
        )
        self.output_delay = self.conv1.output_delay
        self.conv2 = causal_conv(channels, channels, 1, input_delay=self.output_delay)
        self.wait = Delay(channels, self.output_delay - input_delay, input_delay=input_delay)

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        h = self.conv2(self.conv1(x, step, self.snake1), step, self.snake2)
        return h.add_(self.wait(x, step))


def _snake(channels: int) -> Snake:
    return Snake(channels, beta=False, log_scale=False)
