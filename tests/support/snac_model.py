"""Folders of SNAC models with random weights, as the package `snac` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.dac_model import numbered_shapes
from tests.support.family_golden import FamilyGolden
from tests.support.random_weights import fill_dac
from token2wav.families import read_config
from token2wav.families.snac.networks import FAMILY

_NORM = (".parametrizations.weight.original0", ".parametrizations.weight.original1")


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
