"""BigVGAN v1 and v2: mel to audio by transposed convolutions and blocks of periodic activations.

Modules and parameters have the names of public `generator` checkpoints; weight norm is folded into plain weights when
they are read (`bigvgan_weights.py`). Paper: "BigVGAN: A Universal Neural Vocoder with Large-Scale Training".
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from token2wav.bigvgan_config import EDGE_KERNEL, BigVGANConfig
from token2wav.vocoder.activations import AntiAliased, Snake
from token2wav.vocoder.bigvgan_weights import read_generator
from token2wav.weights import Blank, fill, fitting_weights


def _conv(channels: int, kernel: int, dilation: int) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=(kernel - 1) * dilation // 2)


def _activation(channels: int, config: BigVGANConfig) -> AntiAliased:
    return AntiAliased(Snake(channels, beta=config.activation == "snakebeta", log_scale=config.snake_logscale))


class PairedBlock(nn.Module):
    """`resblock: "1"`. For each dilation: activation, dilated convolution, activation, convolution, added to the input.

    Args:
        channels: of input and output.
        kernel: of all convolutions.
        dilations: of the first one of each pair.
        config: says which activation.
    """

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...], config: BigVGANConfig) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(_conv(channels, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(_conv(channels, kernel, 1) for _ in dilations)
        self.activations = nn.ModuleList(_activation(channels, config) for _ in range(2 * len(dilations)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activations1, activations2 = self.activations[::2], self.activations[1::2]
        for act1, conv1, act2, conv2 in zip(activations1, self.convs1, activations2, self.convs2, strict=True):
            x = x + conv2(act2(conv1(act1(x))))
        return x


class SingleBlock(nn.Module):
    """`resblock: "2"`. As `PairedBlock`, but with only the first activation and convolution of each pair."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...], config: BigVGANConfig) -> None:
        super().__init__()
        self.convs = nn.ModuleList(_conv(channels, kernel, dilation) for dilation in dilations)
        self.activations = nn.ModuleList(_activation(channels, config) for _ in dilations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for act, conv in zip(self.activations, self.convs, strict=True):
            x = x + conv(act(x))
        return x


class BigVGAN(nn.Module):
    """The vocoder as one module, which is also what is exported."""

    def __init__(self, config: BigVGANConfig) -> None:
        super().__init__()
        self.config = config
        block: type[PairedBlock | SingleBlock] = PairedBlock if config.resblock == "1" else SingleBlock
        channels = config.upsample_initial_channel
        self.conv_pre = nn.Conv1d(config.num_mels, channels, EDGE_KERNEL, padding=EDGE_KERNEL // 2)
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for kernel, rate in zip(config.upsample_kernel_sizes, config.upsample_rates, strict=True):
            up = nn.ConvTranspose1d(channels, channels // 2, kernel, rate, padding=(kernel - rate) // 2)
            self.ups.append(nn.Sequential(up))  # checkpoints have a list of one for each stage
            channels //= 2
            for size, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True):
                self.resblocks.append(block(channels, size, dilations, config))
        self.activation_post = _activation(channels, config)
        self.conv_post = nn.Conv1d(channels, 1, EDGE_KERNEL, padding=EDGE_KERNEL // 2, bias=config.use_bias_at_final)

    @property
    def device(self) -> torch.device:
        return self.conv_pre.weight.device

    def freeze(self) -> None:
        """Ends loading."""
        for module in self.modules():
            if isinstance(module, Snake):
                module.freeze()
        self.eval().requires_grad_(False)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        """mel (B, bands, frames) to audio (B, 1, frames * hop_size), within -1 and 1."""
        x = self.conv_pre(mel)
        width = len(self.config.resblock_kernel_sizes)
        for stage, up in enumerate(self.ups):
            x = up(x)
            first, *others = self.resblocks[stage * width : (stage + 1) * width]
            total = first(x)
            for block in others:
                total = total + block(x)
            x = total / width
        audio = self.conv_post(self.activation_post(x))
        return audio.tanh() if self.config.use_tanh_at_final else audio.clamp(-1, 1)


def load_bigvgan(folder: Path | str) -> BigVGAN:
    """A vocoder in float32 on the CPU, ready for inference.

    Args:
        folder: with `config.json` and one of `generator.safetensors`, `bigvgan_generator.pt`, `generator.pt`.

    Raises:
        ConfigError: the configuration cannot be used.
        CheckpointError: no weights, unreadable, or their names and shapes are not those of the configuration.
    """
    folder = Path(folder)
    config = BigVGANConfig.read(folder)
    with Blank():
        module = BigVGAN(config)
    weights, path = read_generator(folder)
    fill(module, fitting_weights(module, weights, path))
    module.freeze()
    return module
