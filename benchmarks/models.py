"""Models of any size with random weights: speed does not depend on what they were trained to say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from token2wav.flow.flow import Flow
from token2wav.model_config import ModelConfig
from token2wav.vocoder.hift import HiFT

TEMPLATE = Path(__file__).resolve().parents[1] / "tests" / "data" / "tiny" / "cosyvoice3.yaml"

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "channels": 64,
        "dim": 64,
        "depth": 2,
        "heads": 2,
        "dim_head": 32,
        "base_channels": 32,
        "cond_channels": 32,
    },
    "small": {
        "channels": 128,
        "dim": 128,
        "depth": 4,
        "heads": 4,
        "dim_head": 32,
        "base_channels": 64,
        "cond_channels": 64,
    },
}


def resized_yaml(sizes: Mapping[str, int]) -> str:
    """The tiny model's `cosyvoice3.yaml` with other sizes, by their keys in that file."""
    text = TEMPLATE.read_text()
    for key, value in sizes.items():
        text, count = re.subn(rf"(?m)^( +{key}:) \d+$", rf"\1 {value}", text)
        if count != 1:
            raise ValueError(f"{key} stands {count} times in {TEMPLATE}")
    return text


def random_model(folder: Path, sizes: Mapping[str, int], seed: int = 0) -> Path:
    """Writes a model folder with random weights and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cosyvoice3.yaml").write_text(resized_yaml(sizes))
    return fill_randomly(folder, seed)


def fill_randomly(folder: Path, seed: int = 0) -> Path:
    """Writes random weights that fit a folder's `cosyvoice3.yaml`, and returns the folder."""
    config = ModelConfig.read(folder)
    torch.manual_seed(seed)
    for stem, module in (("flow", Flow(config.flow)), ("hift", HiFT(config.hift))):
        save_file(module.state_dict(), folder / f"{stem}.safetensors")
    return folder
