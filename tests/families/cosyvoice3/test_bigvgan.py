"""BigVGAN folders: every form of a good one gives the same module, every bad one a sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.models.bigvgan import (
    GOLDEN,
    LEAST,
    SMALL,
    a_mel,
    changed,
    load_bigvgan,
    random_bigvgan,
)
from testkit.models.tiny_model import one_line
from testkit.tables import table
from token2wav.errors import CheckpointError, ConfigError
from token2wav.families.cosyvoice3.bigvgan import check_mel, read_bigvgan
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.configs import BigVGANConfig, MelSettings
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


def newer_names(weights: Weights) -> Weights:
    def newer(name: str) -> str:
        name = name.replace(".weight_g", ".parametrizations.weight.original0")
        return name.replace(".weight_v", ".parametrizations.weight.original1")

    return {newer(name): value for name, value in weights.items()}


@pytest.fixture(scope="module")
def least() -> BigVGAN:
    return random_bigvgan(LEAST)


@pytest.fixture
def folder(tmp_path: Path, least: BigVGAN) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config_file(LEAST)))
    save_file(normed(least), tmp_path / "generator.safetensors")
    return tmp_path


def replace(folder: Path, content: object, name: str = "bigvgan_generator.pt") -> None:
    (folder / "generator.safetensors").unlink()
    torch.save(content, folder / name)


def assert_same(network: BigVGAN, expected: BigVGAN) -> None:
    assert network.config == expected.config
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert network.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert network.state_dict()[name].dtype == torch.float32, name
        assert torch.allclose(network.state_dict()[name], value, rtol=1e-6, atol=1e-7), name


def test_safetensors(folder: Path, least: BigVGAN) -> None:
    assert_same(load_bigvgan(folder), least)
    assert_same(load_bigvgan(str(folder)), least)


@pytest.mark.parametrize("name", ["bigvgan_generator.pt", "generator.pt"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("rename", [dict, newer_names])
def test_pickles(
    folder: Path, least: BigVGAN, name: str, nested: bool, rename: Callable[[Weights], Weights]
) -> None:
    weights = rename(normed(least))
    replace(folder, {"generator": weights} if nested else weights, name)
    assert_same(load_bigvgan(folder), least)


def test_weights_without_weight_norm(folder: Path, least: BigVGAN) -> None:
    replace(folder, {"generator": least.state_dict()})
    assert_same(load_bigvgan(folder), least)


def test_other_precisions_are_widened(folder: Path, least: BigVGAN) -> None:
    replace(folder, {"generator": {name: value.double() for name, value in normed(least).items()}})
    assert_same(load_bigvgan(folder), least)


def test_weights_do_not_hold_on_to_their_file(folder: Path, least: BigVGAN) -> None:
    replace(folder, {"generator": least.state_dict()})
    network = load_bigvgan(folder)
    path = folder / "bigvgan_generator.pt"
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


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


LENGTH, DIRECTION = "conv_pre.weight_g", "conv_pre.weight_v"
PARAMETRIZED = "conv_pre.parametrizations.weight.original0"
# changed tensors by their names, None for a missing one, and parts of the message
BROKEN: list[tuple[dict[str, Any], list[str]]] = [
    ({"ups.0.0.weight_g": None}, ["missing: ups.0.0.weight", "unexpected: ups.0.0.weight_v"]),
    ({"activation_post.act.beta": None}, ["1 missing", "activation_post.act.beta"]),
    ({"conv_pre.bias": torch.ones(3)}, ["conv_pre.bias (3,) instead of (16,)"]),
    ({LENGTH: torch.ones(1, 1, 1)}, [LENGTH, "(1, 1, 1)"]),
    ({DIRECTION: torch.ones(16)}, [DIRECTION, "(16,)"]),
    ({DIRECTION: torch.zeros(16, 10, 7)}, ["NaN", "conv_pre.weight"]),
    ({"conv_pre.weight": torch.ones(16, 10, 7)}, ["'conv_pre.weight' appears twice"]),
    ({PARAMETRIZED: torch.ones(16, 1, 1)}, ["'conv_pre.weight_g' appears twice"]),
    ({"conv_post.parametrizations.weight.original7": torch.ones(1)}, ["1 unexpected"]),
    ({"steps": 5}, ["'steps' is a int"]),
    ({"conv_pre.bias": torch.ones(16).long()}, ["'conv_pre.bias' has type torch.int64"]),
    ({"conv_pre.bias": torch.full((16,), float("nan"))}, ["NaN", "conv_pre.bias"]),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN)
def test_broken_weights(
    folder: Path, least: BigVGAN, changes: dict[str, Any], words: list[str]
) -> None:
    weights = {**normed(least), **changes}
    weights = {name: value for name, value in weights.items() if value is not None}
    replace(folder, {"generator": weights})
    with pytest.raises(CheckpointError) as caught:
        load_bigvgan(folder)
    for word in ["bigvgan_generator.pt", *words]:
        assert word in one_line(caught.value)


def test_nothing_in_a_pickle_is_executed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    replace(folder, {"generator": Evil()})
    with pytest.raises(CheckpointError, match="refused, nothing was executed"):
        load_bigvgan(folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("name", ["generator.safetensors", "bigvgan_generator.pt"])
@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 64]
)
def test_files_that_are_something_else(folder: Path, name: str, content: bytes) -> None:
    (folder / "generator.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_bigvgan(folder)
    assert name in one_line(caught.value)


def test_no_weights(folder: Path) -> None:
    (folder / "generator.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_bigvgan(folder)
    assert "none of generator.safetensors, bigvgan_generator.pt, generator.pt" in one_line(
        caught.value
    )


# JSON of a changed key, and the message; test_absurd_sizes.py tries absurd values of every number
CONFIGS = table(
    r"""
{"snake_logscale": null} | snake_logscale: expected bool, got None
{"resblock": "3"} | resblock: '3' is not one of 1, 2
{"activation": "relu"} | activation: 'relu' is not one of snake, snakebeta
{"num_mels": "80"} | num_mels: expected int, got '80'
{"upsample_rates": 4} | upsample_rates: expected a list, got int
{"snake_logscale": 1} | snake_logscale: expected bool, got 1
{"upsample_rates": [], "upsample_kernel_sizes": []} | upsample_rates: empty
{"resblock_dilation_sizes": [[1], []]} | resblock_dilation_sizes[1]: empty
{"resblock_dilation_sizes": [[1], [0]]} | resblock_dilation_sizes[1][0]: 0 is not between 1 and 4096
{"upsample_kernel_sizes": [8]} | upsample_kernel_sizes: 1 entries, but upsample_rates has 2
{"resblock_kernel_sizes": [3]} | resblock_dilation_sizes: 2 entries, but resblock_kernel_sizes has 1
{"resblock_kernel_sizes": [3, 4]} | resblock_kernel_sizes[1]: 4 is even
{"upsample_kernel_sizes": [2, 4]} | upsample_kernel_sizes[0]: 2 must equal the rate 4
{"upsample_kernel_sizes": [8, 5]} | upsample_kernel_sizes[1]: 5 must equal the rate 2
{"upsample_initial_channel": 1} | upsample_initial_channel: 1 is too small for 2 stages
{"hop_size": 256} | hop_size: 256, but upsample_rates give 8 samples per frame
"""
)


@pytest.mark.parametrize(("changes", "message"), CONFIGS)
def test_broken_configurations(folder: Path, changes: str, message: str) -> None:
    values = config_file(SMALL) | json.loads(changes)
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        load_bigvgan(folder)
    assert f"{folder / 'config.json'}: {message}" in one_line(caught.value)


def test_a_missing_key_is_named(folder: Path) -> None:
    values = config_file(SMALL)
    del values["snake_logscale"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="snake_logscale: missing"):
        load_bigvgan(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"config"', "[" * 100_000, "\0", "NaN"])
def test_files_that_are_no_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_bigvgan(folder)
    assert "config.json" in one_line(caught.value)


def test_no_configuration(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError) as caught:
            load_bigvgan(folder)
        assert "not a BigVGAN folder, config.json cannot be read" in one_line(caught.value)


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


def test_a_vocoder_for_other_mels_is_refused_early(folder: Path) -> None:
    (folder / "generator.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        check_mel(read_bigvgan(folder), MelSettings(24000, 480, 80))
    message = one_line(caught.value)
    for words in ("sampling_rate is 8000 instead of", "hop_size is 8", "num_mels is 10 instead of"):
        assert words in message
