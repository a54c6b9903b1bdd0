from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from testkit.models.bigvgan import GOLDEN, load_bigvgan
from token2wav.networks.bigvgan import BigVGAN


@pytest.fixture(scope="session")
def bigvgan_golden() -> dict[str, torch.Tensor]:
    """`mel` (1, bands, frames), and the public code's audio `wav` (1, 1, samples) for that mel."""
    return load_file(GOLDEN / "io.safetensors")


@pytest.fixture(scope="session")
def bigvgan() -> BigVGAN:
    """BigVGAN whose golden tensors are `bigvgan_golden`."""
    return load_bigvgan(GOLDEN)
