"""BigVGAN folders: every form of a good one gives the same module."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.models.bigvgan import GOLDEN, LEAST, a_mel, changed, load_bigvgan, random_bigvgan
from token2wav.families.cosyvoice3.bigvgan import check_mel, read_bigvgan
from token2wav.networks.bigvgan import BigVGAN
from token2wav.published.sizes import BigVGANConfig, MelSettings
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage

Weights = dict[str, Any]
TRAINING = {
    "batch_size": 32,
    "n_fft": 1024,
    "fmax": None,
    "discriminator": "mrd",
}  # keys that the loader ignores


def config_file(config: BigVGANConfig) -> dict[str, Any]:
    """Returns a configuration of v1, which lacks the keys of the final layer."""
    return {
        name: value for name, value in vars(config).items() if not name.startswith("use_")
    } | TRAINING


def normed(bigvgan: BigVGAN) -> Weights:
    """Returns a state dict in the published form: weight norm with directions of other lengths."""
    weights: Weights = {}
    for name, value in bigvgan.state_dict().items():
        if name.endswith(".weight"):
            weights[f"{name}_g"] = value.norm(dim=(1, 2), keepdim=True)
            weights[f"{name}_v"] = value * 1.7
        else:
            weights[name] = value
    return weights


@pytest.fixture(scope="module")
def least() -> BigVGAN:
    return random_bigvgan(LEAST)


@pytest.fixture
def folder(tmp_path: Path, least: BigVGAN) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config_file(LEAST)))
    save_file(normed(least), tmp_path / "generator.safetensors")
    return tmp_path


def assert_same(network: BigVGAN, expected: BigVGAN) -> None:
    assert network.config == expected.config
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert network.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert network.state_dict()[name].dtype == torch.float32, name
        assert torch.allclose(network.state_dict()[name], value, rtol=1e-6, atol=1e-7), name


FORMS: dict[str, Callable[[BigVGAN], dict[str, Any]]] = {
    "published": lambda bigvgan: {"generator": normed(bigvgan)},
    "not nested": normed,
    "without weight norm": lambda bigvgan: {"generator": bigvgan.state_dict()},
    "double precision": lambda bigvgan: {
        name: value.double() for name, value in normed(bigvgan).items()
    },
}


def test_safetensors(folder: Path, least: BigVGAN) -> None:
    assert_same(load_bigvgan(folder), least)
    assert_same(load_bigvgan(str(folder)), least)


@pytest.mark.parametrize("name", ["bigvgan_generator.pt", "generator.pt"])
@pytest.mark.parametrize("form", FORMS)
def test_pickles(folder: Path, least: BigVGAN, name: str, form: str) -> None:
    (folder / "generator.safetensors").unlink()
    torch.save(FORMS[form](least), folder / name)
    assert_same(load_bigvgan(folder), least)


def test_weights_do_not_hold_on_to_their_file(folder: Path, least: BigVGAN) -> None:
    path = folder / "bigvgan_generator.pt"
    (folder / "generator.safetensors").unlink()
    torch.save({"generator": least.state_dict()}, path)
    network = load_bigvgan(folder)
    path.write_bytes(bytes(path.stat().st_size))
    assert_same(network, least)


def test_the_golden_folder_has_the_names_of_public_checkpoints() -> None:
    names = load_file(GOLDEN / "generator.safetensors").keys()
    assert {
        "ups.0.0.weight_g",
        "resblocks.17.convs2.2.weight_v",
        "activation_post.act.beta",
    } <= names
    assert "conv_post.bias" not in names
    load_bigvgan(GOLDEN)


def test_v1_files_leave_out_how_it_ends(folder: Path) -> None:
    config = read_bigvgan(folder)
    assert (config.use_tanh_at_final, config.use_bias_at_final) == (True, True)


def test_odd_channels_are_halved_as_integers() -> None:
    """The public code does the same: 48 channels and five stages end with one channel."""
    five = changed(
        upsample_initial_channel=48,
        upsample_rates=(2,) * 5,
        upsample_kernel_sizes=(4,) * 5,
        hop_size=32,
    )
    bigvgan = random_bigvgan(five)
    assert [up[0].out_channels for up in bigvgan.ups] == [24, 12, 6, 3, 1]  # type: ignore[index]
    with torch.inference_mode():
        audio = bigvgan(a_mel(5)[None])
    assert audio.shape == (1, 1, 5 * 32)
    assert audio.std() > 0


# The vocoder and the flow before it.


def test_a_vocoder_that_fits(folder: Path, least: BigVGAN) -> None:
    check_mel(read_bigvgan(folder), MelSettings(8000, 8, 10))
    engine = WaveformStage(load_bigvgan(folder))
    [audio] = engine.advance([(engine.open(), FrameChunk(torch.zeros(10, 4), last=True))])
    assert audio.shape == (4 * least.config.hop_size,)
