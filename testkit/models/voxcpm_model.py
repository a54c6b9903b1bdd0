"""Folders of VoxCPM with a random AudioVAE, as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from testkit.models.dac_model import WEIGHT_NORM, numbered_shapes
from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill_dac
from token2wav.families.voxcpm.family import FAMILY
from token2wav.published.registry import read_config

# openbmb/VoxCPM2, VoxCPM1.5 and VoxCPM-0.5B, which has no such section
VOXCPM2: dict[str, Any] = {
    "encoder_dim": 128,
    "encoder_rates": [2, 5, 8, 8],
    "latent_dim": 64,
    "decoder_dim": 2048,
    "decoder_rates": [8, 6, 5, 2, 2, 2],
    "sr_bin_boundaries": [20000, 30000, 40000],
    "sample_rate": 16000,
    "out_sample_rate": 48000,
}
VOXCPM_1_5: dict[str, Any] = {
    "encoder_dim": 64,
    "encoder_rates": [2, 3, 6, 7, 7],
    "latent_dim": 64,
    "decoder_dim": 2048,
    "decoder_rates": [7, 7, 6, 3, 2],
    "sample_rate": 44100,
}
Weights = dict[str, torch.Tensor]


def document(sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of `config.json`, of VoxCPM2 if the sizes have an `out_sample_rate`."""
    architecture = {"architecture": "voxcpm2"} if "out_sample_rate" in sizes else {}
    section = {"audio_vae_config": sizes} if sizes else {}
    return {**architecture, "lm_config": {"hidden_size": 1024}, "feat_dim": 64, **section}


def config_of(folder: Path, content: dict[str, Any]) -> Any:
    """Writes the `config.json` of a model, and reads it as a configuration."""
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "audiovae.pth").touch()
    return read_config(folder)


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a folder with `audiovae.pth`, and returns it."""
    weights = published_weights(config_of(folder, document(golden.sizes)))
    torch.save({"state_dict": weights}, folder / "audiovae.pth")
    return folder


def write_bare(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a folder with `audiovae.pth` without the key `state_dict`, and returns it."""
    path = write_model(folder, golden) / "audiovae.pth"
    torch.save(torch.load(path)["state_dict"], path)
    return folder


def write_safetensors(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a folder with `audiovae.safetensors`, and returns it."""
    weights = published_weights(config_of(folder, document(golden.sizes)))
    (folder / "audiovae.pth").write_text("not read")
    save_file(weights, folder / "audiovae.safetensors")
    return folder


def published_weights(config: Any) -> Weights:
    """Returns weights under the published names."""
    sizes = config.sizes
    with torch.device("meta"):
        network: Any = FAMILY.network(config, "decoder")
    first = ["conv0", "conv1"] if sizes.depthwise else ["conv1"]
    weights: Weights = {}
    boundaries = sizes.sr_bin_boundaries
    for number, block in enumerate(network.decoder.block if boundaries else ()):
        scale = block.scale
        del block.scale
        for kind in ("scale", "bias"):
            name = f"decoder.sr_cond_model.{len(first) + number}.{kind}_embed.weight"
            weights[name] = torch.empty(len(boundaries) + 1, len(scale.bias))
    weights |= numbered_shapes(network, first, ["snake1", "conv_t1"], WEIGHT_NORM)
    fill_dac(weights)
    if boundaries:
        weights["decoder.sr_bin_boundaries"] = torch.tensor(boundaries, dtype=torch.int32)
    return weights
