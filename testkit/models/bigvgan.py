"""BigVGANs for tests: the golden one, and small random ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.families.cosyvoice3.bigvgan import GENERATOR_FILES, read_bigvgan
from token2wav.layers.snake import Snake
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.flow_weights import read_bigvgan_weights
from token2wav.networks.weights import fill
from token2wav.published.checkpoint_files import weights_file
from token2wav.published.sizes import BigVGANConfig

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "bigvgan"

SMALL = BigVGANConfig(
    resblock="1",
    upsample_rates=(4, 2),
    upsample_kernel_sizes=(8, 4),
    upsample_initial_channel=16,
    resblock_kernel_sizes=(3, 5),
    resblock_dilation_sizes=((1, 3), (2,)),
    activation="snakebeta",
    snake_logscale=True,
    num_mels=10,
    hop_size=8,
    sampling_rate=8000,
)


def changed(**changes: Any) -> BigVGANConfig:
    """Returns `SMALL` with other values."""
    return dataclasses.replace(SMALL, **changes)


def random_bigvgan(config: BigVGANConfig) -> BigVGAN:
    """Returns a BigVGAN for inference; its audio is within the limits and not near zero."""
    generator = torch.Generator().manual_seed(0)
    bigvgan = BigVGAN(config)
    with torch.no_grad():
        for module in bigvgan.modules():
            if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
                taps = (
                    module.weight[0].numel()
                    if isinstance(module, nn.Conv1d)
                    else module.weight[:, 0].numel()
                )
                module.weight.normal_(0, taps**-0.5, generator=generator)
                if module.bias is not None:
                    module.bias.normal_(0, 0.1, generator=generator)
            elif isinstance(module, Snake):
                for parameter in module.parameters():
                    parameter.add_(torch.rand(parameter.shape, generator=generator))
        bigvgan.conv_post.weight.mul_(0.1)
    bigvgan.freeze()
    return bigvgan


def a_mel(frames: int, bands: int = SMALL.num_mels, seed: int = 0) -> torch.Tensor:
    """Returns a mel (bands, frames) with values like logarithms of energies."""
    return torch.randn(bands, frames, generator=torch.Generator().manual_seed(seed)) * 2 - 4


def load_bigvgan(folder: Path) -> BigVGAN:
    """Loads the vocoder of a folder with `config.json` and weights, as families load it."""
    module = BigVGAN(read_bigvgan(folder))
    fill(module, read_bigvgan_weights(module, weights_file(folder, GENERATOR_FILES)))
    module.freeze()
    return module
