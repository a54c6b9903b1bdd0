from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.families.bigvgan.rig import GOLDEN, LEAST, SMALL, load_bigvgan, random_bigvgan
from token2wav.families.bigvgan.network import BigVGAN


@pytest.fixture(scope="session")
def golden() -> dict[str, torch.Tensor]:
    """`mel` (1, bands, frames), and the public code's audio `wav` (1, 1, samples) for that mel."""
    return load_file(GOLDEN / "io.safetensors")


@pytest.fixture(scope="session")
def bigvgan() -> BigVGAN:
    return load_bigvgan(GOLDEN)


@pytest.fixture(scope="session")
def small() -> BigVGAN:
    return random_bigvgan(SMALL)


@pytest.fixture(scope="session")
def least() -> BigVGAN:
    return random_bigvgan(LEAST)
