"""VoxCPM's AudioVAE: scales and biases of a rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.models.family_golden import FamilyGolden
from testkit.models.voxcpm_model import VOXCPM2, VOXCPM_1_5, config_of, document, published_weights
from token2wav.assembly import family_for, load_network

GOLDEN = FamilyGolden("voxcpm", "tiny")


@pytest.mark.parametrize(
    ("rate", "row"), [(16_000, 0), (20_000, 0), (20_001, 1), (40_000, 2), (48_000, 3)]
)
def test_the_rate_of_the_audio_selects_a_scale_and_a_bias(
    rate: int, row: int, tmp_path: Path
) -> None:
    sizes = {"decoder_dim": 64, "decoder_rates": [32, 32], "encoder_rates": [1024]}
    content = document({**VOXCPM2, **sizes, "sample_rate": rate, "out_sample_rate": rate})
    config = config_of(tmp_path, content)
    weights = published_weights(config)
    torch.save(weights, tmp_path / "audiovae.pth")
    network: Any = load_network(tmp_path, config, "decoder")
    for layer, block in enumerate(network.decoder.block, 2):
        for kind, parameter in (("scale", block.scale.weight), ("bias", block.scale.bias)):
            published = weights[f"decoder.sr_cond_model.{layer}.{kind}_embed.weight"]
            assert torch.equal(parameter, published[row])


@pytest.mark.parametrize("boundaries", [None, []])
def test_voxcpm2_without_boundaries(boundaries: Any, tmp_path: Path) -> None:
    """Null is a decoder without scales, and an empty list is one range."""
    content = document({**GOLDEN.sizes, "sr_bin_boundaries": boundaries})
    config = config_of(tmp_path, content)
    network: Any = family_for(config).network(config, "decoder")
    assert hasattr(network.decoder.block[0], "scale") == (boundaries is not None)
    assert config.sizes.rate_range == 0


def test_the_older_vae_has_no_settings_of_the_newer_one(tmp_path: Path) -> None:
    """Its public code skips them."""
    content = document({**VOXCPM_1_5, "sr_bin_boundaries": [20_000]})
    assert config_of(tmp_path, content).sizes.sr_bin_boundaries is None
