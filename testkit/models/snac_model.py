"""Folders of SNAC models with random weights, as the package `snac` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from testkit.models.dac_model import numbered_shapes
from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_dac
from token2wav.families.snac.family import FAMILY
from token2wav.published.registry import read_config

# hubertsiuzdak/snac_24khz, and hubertsiuzdak/snac_44khz. snac_32khz differs from the latter in the
# sample rate alone.
SNAC_24KHZ: dict[str, Any] = {
    "sampling_rate": 24000,
    "encoder_dim": 48,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 1024,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 4096,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
SNAC_44KHZ: dict[str, Any] = SNAC_24KHZ | {
    "sampling_rate": 44100,
    "encoder_dim": 64,
    "encoder_rates": [2, 3, 8, 8],
    "decoder_dim": 1536,
    "decoder_rates": [8, 8, 3, 2],
    "attn_window_size": 32,
    "vq_strides": [8, 4, 2, 1],
}
_NORM = (".parametrizations.weight.original0", ".parametrizations.weight.original1")


def config_of(folder: Path, sizes: dict[str, Any]) -> Any:
    """Writes the `config.json` of a model, and reads it as a configuration."""
    (folder / "config.json").write_text(json.dumps(sizes))
    return read_config(folder)


def write_snac(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a folder of a model, and returns it."""
    (folder / "config.json").write_text(json.dumps(golden.sizes))
    torch.save(published_weights(folder), folder / "pytorch_model.bin")
    return folder


def published_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns weights under the names of the package, for the `config.json` of a folder."""
    config: Any = read_config(folder)
    with torch.device("meta"):
        network = FAMILY.network(config, "decoder")
    first = ["conv0", "conv1"] if config.sizes.depthwise else ["conv1"]
    first += [] if config.sizes.attn_window_size is None else ["attention"]
    noise = ["noise"] if config.sizes.noise else []
    return fill_dac(numbered_shapes(network, first, ["snake1", "conv_t1", *noise], _NORM))
