"""EAR-TTS's codec: its published sizes, and folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from testkit.models.ear_tts_model import PUBLISHED, document, write_model
from testkit.models.family_golden import FamilyGolden
from token2wav import CheckpointError, ConfigError
from token2wav.assembly import check_folder
from token2wav.families.ear_tts.family import EarTtsDecoder
from token2wav.families.registry import read_config

GOLDEN = FamilyGolden("ear_tts", "tiny")


def with_codec(**changes: Any) -> dict[str, Any]:
    """Returns a `config.json` with other sizes of the codec; None removes a size."""
    content = document(GOLDEN)
    section = {**content["model"]["speech_generation"]["model"]["codec_config"], **changes}
    content["model"]["speech_generation"]["model"]["codec_config"] = {
        name: value for name, value in section.items() if value is not None
    }
    return content


def written(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_published_sizes(tmp_path: Path) -> None:
    """12.5 frames a second; the last 6 samples of a chunk wait for the next window."""
    config: Any = read_config(written(tmp_path, document(SimpleNamespace(sizes=PUBLISHED))))
    assert (config.sample_rate, config.token_frame_rate) == (22050, 12.5)
    with torch.device("meta"):
        network = EarTtsDecoder(config.sizes)
    assert (network.output_delay, network.missing_samples) == (6, 0)
    assert (network.lookahead_frames, network.first_frames) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": None}, "rates: missing"),
        ({"rates": [3]}, "channel_mult: 2 factors, but rates have 1"),
        ({"wav_to_token_ratio": 25}, "wav_to_token_ratio: 25, but rates and hop_length give 24"),
        ({"hop_length": 16, "wav_to_token_ratio": 96}, "hop_length: 16 with n_fft 16"),
        ({"groups": 4}, "groups: 4 does not divide 6 channels"),
        ({"num_quantizers": 65}, "num_quantizers: 65 is not between 1 and 64"),
        ({"base_hidden_size": 1 << 16}, "more than 65536"),
    ],
)
def test_values_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config.json: model.speech_generation.*{message}"):
        read_config(written(tmp_path, with_codec(**changes)))


def test_a_model_without_a_codec_is_refused(tmp_path: Path) -> None:
    content: dict[str, Any] = {"data": {}, "model": {"stt": {}}}
    with pytest.raises(ConfigError, match=r"codec_config: expected an object; .* has no codec"):
        read_config(written(tmp_path, content))


def test_weights_that_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, GOLDEN)
    weights = load_file(tmp_path / "model.safetensors")
    start = "tts_model.audio_codec."
    for name, value, message in (
        (f"{start}prvq.mus_list.4", None, "prvq.mus_list.4 is missing"),
        (f"{start}prvq.mus_list.5", torch.ones(16, 6), "more codebooks, or other shapes"),
        (f"{start}prvq.mus_list.1", torch.ones(15, 6), "more codebooks, or other shapes"),
        (f"{start}decoder.layers.0.weight", None, "1 missing: layers.0.weight"),
        (f"{start}decoder.surplus", torch.ones(3), "1 unexpected: surplus"),
    ):
        changed = {key: tensor for key, tensor in weights.items() if key != name}
        if value is not None:
            changed[name] = value
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            check_folder(tmp_path)
