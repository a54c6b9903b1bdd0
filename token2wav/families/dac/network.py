"""Decoder of DAC: residual codebooks, and symmetric convolutions with Snake.

Modules have the names of the published weights in the format of `transformers`.
"""

from __future__ import annotations

import torch
from torch import nn

from token2wav.families.dac.config import DILATIONS, KERNEL, DacSizes, DecoderSizes
from token2wav.networks.codebooks import ProjectedCodebooks
from token2wav.networks.combine import Chain, Residual
from token2wav.networks.position_noise import PositionNoise
from token2wav.networks.snake import Snake
from token2wav.networks.streaming import (
    OFFLINE,
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
        self.output = self.decoder.place()

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


class Decoder(Chain):
    """Decoder from latents to audio, which other codecs share.

    Args:
        sizes: sizes of the decoder.
        whole_frames: whether every frame has all its samples. If not, an upsampling by an odd
            factor returns one output less, as in DAC.
        depthwise: whether the convolutions with a kernel of more than one position, except the
            last, filter every channel by itself.
        noise: whether noise follows every upsampling.
        attention: layer before the first upsampling; None for no such layer.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        whole_frames: bool = False,
        depthwise: bool = False,
        noise: bool = False,
        attention: Streaming | None = None,
    ) -> None:
        latents, channels = sizes.latents, sizes.decoder_hidden_size
        layers: dict[str, nn.Module] = {}
        if depthwise:
            layers["conv0"] = centred_conv(latents, latents, KERNEL, groups=latents)
            layers["conv1"] = causal_conv(latents, channels, 1)
        else:
            layers["conv1"] = centred_conv(latents, channels, KERNEL)
        if attention is not None:
            layers["attention"] = attention
        layers["block"] = Chain(
            UpsamplingBlock(
                channels >> number,
                rate,
                whole_frames=whole_frames,
                depthwise=depthwise,
                noise_seed=number if noise else None,
            )
            for number, rate in enumerate(sizes.rates)
        )
        channels >>= len(sizes.rates)
        super().__init__(
            layers | {"snake1": _snake(channels), "conv2": centred_conv(channels, 1, KERNEL)}
        )

    def freeze(self) -> None:
        """Ends loading."""
        for module in self.modules():
            if isinstance(module, Snake | PositionNoise):
                module.freeze()


class UpsamplingBlock(Chain):
    """Activation, upsampling to half of the channels, noise if the model has it, and residual units
    with growing dilations.

    Args:
        channels: channels of the input.
        rate: factor of upsampling.
        whole_frames, depthwise: see `Decoder`.
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
    ) -> None:
        half, start = channels // 2, (rate + 1) // 2
        cut = (start, rate - start if whole_frames else start)
        layers: dict[str, nn.Module] = {
            "snake1": _snake(channels),
            "conv_t1": StreamConvTranspose(channels, half, 2 * rate, rate, cut=cut),
        }
        if noise_seed is not None:
            layers["noise"] = PositionNoise(half, seed=noise_seed)
        for number, dilation in enumerate(DILATIONS, 1):
            layers[f"res_unit{number}"] = _residual_unit(half, dilation, depthwise)
        super().__init__(layers)


def _residual_unit(channels: int, dilation: int, depthwise: bool) -> Residual:
    """Makes two convolutions, each after an activation."""
    groups = channels if depthwise else 1
    return Residual(
        channels,
        {
            "snake1": _snake(channels),
            "conv1": centred_conv(channels, channels, KERNEL, dilation=dilation, groups=groups),
            "snake2": _snake(channels),
            "conv2": causal_conv(channels, channels, 1),
        },
    )


def _snake(channels: int) -> Snake:
    return Snake(channels, beta=False, log_scale=False)
