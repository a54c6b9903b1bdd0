"""VoxCPM's AudioVAE: its published sizes and formats, and folders that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.voxcpm_model import (
    VOXCPM2,
    VOXCPM_1_5,
    config_of,
    document,
    published_weights,
    write_model,
    write_safetensors,
)
from testkit.utterances import off
from token2wav import CheckpointError, ConfigError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.assembly import check_folder, family_for, load_network

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
GOLDEN = FamilyGolden("voxcpm", "tiny")


def write_bare(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a folder with `audiovae.pth` without the key `state_dict`."""
    write_model(folder, golden)
    path = folder / "audiovae.pth"
    torch.save(torch.load(path)["state_dict"], path)
    return folder


@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize("write", [write_model, write_bare, write_safetensors])
def test_files_of_weights_give_the_public_audio(
    write: Callable[[Path, FamilyGolden], Path], size: str, tmp_path: Path
) -> None:
    golden = FamilyGolden("voxcpm", size)
    model = Token2Wav.load(write(tmp_path, golden), runtime=RuntimeConfig(device="cpu"))
    expected = golden["audio"].numpy()
    assert off(model.synthesize(golden["latents"].numpy()), expected) <= PARITY * expected.std()


@pytest.mark.parametrize(
    ("content", "rate", "samples", "parameters"),
    [
        (document(VOXCPM2), 48_000, 1920, 45_736_449),
        ({"architecture": "VoxCPM2"}, 48_000, 1920, 45_736_449),
        (document(VOXCPM_1_5), 44_100, 1764, 42_898_177),
        (document({}), 16_000, 640, 26_907_009),
        ({"architecture": "voxcpm", "audio_vae_config": None}, 16_000, 640, 26_907_009),
    ],
    ids=["2", "2 without sizes", "1.5", "0.5B", "0.5B with null"],
)
def test_published_sizes(
    content: dict[str, Any], rate: int, samples: int, parameters: int, tmp_path: Path
) -> None:
    """Every latent of 64 numbers has 40 ms, and its audio does not wait for later ones."""
    config = config_of(tmp_path, content)
    assert (config.sample_rate, config.samples_per_token) == (rate, samples)
    assert (config.token_frame_rate, config.tokens.shape) == (25, (64,))
    assert config.hops(StreamConfig()) == (1, 32)
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    assert (network.output_delay, network.missing_samples) == (0, 0)
    assert sum(weight.numel() for weight in network.parameters()) == parameters


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


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("out_sample_rate", 24_000, "out_sample_rate: 24000 is not supported; expected 48000"),
        ("decoder_rates", [8, 6, 5], "out_sample_rate: 48000 is not supported; expected 6000"),
        ("sample_rate", 24_000, "out_sample_rate: 48000 is not supported; expected 72000"),
        ("decoder_rates", [], "decoder_rates: empty"),
        ("encoder_rates", [], "encoder_rates: empty"),
        ("decoder_rates", [2, 10**9], "is not between 1 and 4096"),
        ("decoder_dim", 2049, "decoder_dim: 2049 cannot be halved 6 times"),
        ("latent_dim", None, "latent_dim: expected int"),
        ("use_noise_block", True, "use_noise_block: True is not supported; expected False"),
        ("cond_out_layer", True, "cond_out_layer: True is not supported; expected False"),
        ("cond_type", "add", "cond_type: 'add' is not one of scale_bias, scale_bias_init"),
        ("sr_bin_boundaries", [3, 2], r"sr_bin_boundaries: \[3, 2\] are not in ascending order"),
        ("sr_bin_boundaries", [1] * 65, "sr_bin_boundaries: 65 items; at most 64"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config.json: audio_vae_config.*{message}"):
        config_of(tmp_path, document({**VOXCPM2, key: value}))


def test_frames_that_are_too_rare(tmp_path: Path) -> None:
    sizes = {"sample_rate": 1, "decoder_rates": [256], "encoder_rates": [256]}
    with pytest.raises(ConfigError, match=r"decoder_rates: latents per second: .* is not"):
        config_of(tmp_path, document({**VOXCPM_1_5, **sizes}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"architecture": "voxcpm3"}, "architecture: 'voxcpm3' is not one of voxcpm, voxcpm2"),
        ({"audio_vae_config": [1]}, "audio_vae_config: expected an object, got list"),
    ],
)
def test_documents_that_are_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        config_of(tmp_path, content)


def test_weights_that_are_refused_and_weights_that_are_not_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path, GOLDEN)
    path = tmp_path / "audiovae.safetensors"
    weights = published_weights(config_of(tmp_path, document(GOLDEN.sizes)))
    save_file(weights | {"encoder.fc_mu.bias": torch.full((2,), torch.nan)}, path)
    check_folder(tmp_path)
    boundaries, scale = "decoder.sr_bin_boundaries", "decoder.sr_cond_model.2.scale_embed.weight"
    for name, value, message in (
        (scale, None, r"1 missing: decoder\.block\.0\.scale\.weight"),
        (scale, torch.ones(3, 32), r"wrongly shaped: decoder\.block\.0\.scale\.weight \(3, 32\)"),
        ("decoder.model.0.weight_g", None, r"unexpected: decoder\.conv0\.weight_v"),
        ("decoder.model.9.bias", torch.ones(1), r"unexpected: decoder\.model\.9\.bias"),
        ("decoder.model.0.bias", torch.full((5,), torch.nan), r"NaN .* in decoder\.conv0\.bias"),
        (boundaries, torch.tensor([1, 2]), r"is \[1, 2\], but sr_bin_boundaries of the .* \(600, "),
    ):
        changed = {other: tensor for other, tensor in weights.items() if other != name}
        save_file(changed if value is None else changed | {name: value}, path)
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)
    path.unlink()
    torch.save({"state_dict": [1]}, tmp_path / "audiovae.pth")
    with pytest.raises(CheckpointError, match=r"no weight is named decoder\.\*"):
        check_folder(tmp_path)
