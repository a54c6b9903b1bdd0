"""VibeVoice in its three published formats, and folders that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.vibevoice_model import (
    write_microsoft,
    write_tokenizer,
    write_transformers,
)
from testkit.utterances import off
from token2wav import CheckpointError, ConfigError, RuntimeConfig, Token2Wav
from token2wav.assembly import check_folder
from token2wav.families.registry import read_config

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")
GOLDEN = FamilyGolden("vibevoice", "tiny")
# A whole model whose decoder is a small part of one file: its language model has 256 MB in
# bfloat16, the decoder 40 MB in float32.
LARGE = {"num_filters": 128, "downsampling_ratios": [2, 2, 2], "depths": [1, 1, 1, 4]}
PEAK = """
import resource, sys
from pathlib import Path
from token2wav.assembly import load_network
from token2wav.families.registry import read_config

folder = Path(sys.argv[1])
config = read_config(folder)
peak = lambda: next(
    int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")
)
before = peak()
network = load_network(folder, config, "decoder")
weights = sum(value.numel() * 4 for value in network.parameters()) // 1024
print(peak() - before, weights)
"""


def audio_of(folder: Path) -> Any:
    return Token2Wav.load(folder, runtime=CPU).synthesize(GOLDEN["latents"].numpy())


@pytest.mark.parametrize("write", [write_tokenizer, write_transformers, write_microsoft])
def test_three_formats_give_the_public_audio(
    write: Callable[[Path, FamilyGolden], Path], tmp_path: Path
) -> None:
    golden = GOLDEN["audio"].numpy()
    assert off(audio_of(write(tmp_path, GOLDEN)), golden) <= PARITY * golden.std()


def test_latents_are_scaled_by_the_factors_of_the_folder(tmp_path: Path) -> None:
    """The public code divides by the scale, and then subtracts the bias."""
    write_microsoft(tmp_path, GOLDEN, factors=(0.25, -0.5))
    model, golden = Token2Wav.load(tmp_path, runtime=CPU), GOLDEN["audio"].numpy()
    scaled = 0.25 * (GOLDEN["latents"].numpy() - 0.5)
    assert off(model.synthesize(scaled), golden) <= 2 * PARITY * golden.std()


def test_published_sizes(tmp_path: Path) -> None:
    """The configuration of VibeVoice-Realtime-0.5B gives 7.5 latents a second, of 64 numbers."""
    section = {
        "vae_dim": 64,
        "decoder_ratios": [8, 5, 5, 4, 2, 2],
        "encoder_depths": "3-3-3-3-3-3-8",
    }
    document = {"model_type": "vibevoice_streaming", "acoustic_tokenizer_config": section}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config: Any = read_config(tmp_path)
    assert (config.token_frame_rate, config.samples_per_token) == (7.5, 3200)
    assert config.tokens.shape == (64,)
    assert config.sizes.depths[::-1] == (8, 3, 3, 3, 3, 3, 3)


def test_only_the_decoder_is_read(tmp_path: Path) -> None:
    """Loading takes the memory of the decoder in float32, and at most 200 MB more."""
    golden = FamilyGolden("vibevoice", "tiny")
    golden.__dict__["sizes"] = {**golden.sizes, **LARGE}
    write_transformers(tmp_path, golden)
    weights = load_file(tmp_path / "model.safetensors")
    halves = {name: value.bfloat16() for name, value in weights.items()}
    halves["model.language_model.weight"] = torch.ones(1 << 27, dtype=torch.bfloat16)
    save_file(halves, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    grown, size = map(int, subprocess.check_output(command, text=True).split())
    assert size > 20_000
    assert grown <= size + 200_000  # KB


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("causal", False, "causal: False is not supported; expected True"),
        ("layernorm", "LN", "layernorm: 'LN' is not supported"),
        ("encoder_depths", "3-x", "'3-x' is no list of numbers such as 3-3-8"),
        ("encoder_depths", "3-3", "depths: 2 stages, but downsampling_ratios have 3"),
        ("decoder_ratios", [0, 1, 1], r"downsampling_ratios\[2\]: 0 is not between"),
        ("vae_dim", "64", "hidden_size: expected int"),
        ("channels", 2, "channels: 2 is not between 1 and 1"),
        ("decoder_n_filters", 1 << 15, "more than 65536 channels after 3 doublings"),
        ("layernorm_eps", 0, "rms_norm_eps: 0.0 is not between"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    write_microsoft(tmp_path, GOLDEN)
    document = json.loads((tmp_path / "config.json").read_text())
    document["acoustic_tokenizer_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=f"config.json: acoustic_tokenizer_config.*{message}"):
        read_config(tmp_path)


def test_documents_that_are_refused(tmp_path: Path) -> None:
    for content, message in (
        ({"model_type": "vibevoice"}, "this folder has no acoustic decoder"),
        ({"model_type": "vibevoice", "audio_config": []}, "audio_config: expected an object"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
            read_config(tmp_path)


def test_weights_that_are_refused(tmp_path: Path) -> None:
    write_transformers(tmp_path, GOLDEN)
    weights = load_file(tmp_path / "model.safetensors")
    decoder = "model.audio_tower.decoder."
    for name, value, message in (
        (f"{decoder}head.conv.bias", None, "1 missing: head.bias"),
        (f"{decoder}surplus.weight", torch.ones(3), "1 unexpected: surplus.weight"),
        ("model.latent_bias_factor", torch.tensor(torch.nan), "infinite values in bias_factor"),
        ("model.latent_bias_factor", torch.ones(2), "bias_factor .2,. instead of"),
        ("model.latent_scaling_factor", None, "1 missing: scaling_factor"),
    ):
        changed = dict(weights)
        if value is None:
            del changed[name]
        else:
            changed[name] = value
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)
