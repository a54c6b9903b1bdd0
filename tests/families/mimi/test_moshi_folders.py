"""Mimi in the folders of `moshi`: both names of projections, and folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from testkit.models.family_golden import FamilyGolden
from testkit.models.moshi_model import SIZES, WEIGHTS, published_weights, write_model
from testkit.utterances import off
from token2wav import CheckpointError, ConfigError, RuntimeConfig, Token2Wav
from token2wav.assembly import check_folder
from token2wav.families.mimi.config import MimiSizes
from token2wav.families.mimi.moshi_config import read_moshi_sizes
from token2wav.families.registry import read_config

# Of the spread of the audio. Sums are in another order than in the public code.
PARITY = 1e-5
CPU = RuntimeConfig(device="cpu")


def test_older_names_of_projections_give_the_same_audio(tmp_path: Path) -> None:
    golden = FamilyGolden("mimi_of_moshi", "tiny")
    write_model(tmp_path, golden)
    older = {
        name.replace("in_projs.0.weight", "in_proj_weight").replace("out_projs.0.", "out_proj."): (
            value
        )
        for name, value in published_weights(golden).items()
    }
    save_file(older, tmp_path / WEIGHTS)
    audio = Token2Wav.load(tmp_path, runtime=CPU).synthesize(golden["codes"].numpy())
    assert off(audio, golden["audio"].numpy()) <= PARITY * float(golden["audio"].std())


def test_sizes_default_to_those_of_the_package(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).touch()
    config = read_config(tmp_path)
    assert (config.sample_rate, config.token_frame_rate, config.tokens.shape) == (
        24000,
        12.5,
        (32,),
    )
    published = MimiSizes(frame_rate=12.5)
    assert {name: getattr(published, name) for name in read_moshi_sizes(tmp_path)} == {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in read_moshi_sizes(tmp_path).items()
    }


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"mimi_name": "../x.safetensors"}, "mimi_name: '../x.safetensors' is no file"),
        ({"mimi_name": "hf://kyutai/moshi/x"}, "mimi_name: 'hf://kyutai/moshi/x' is no file"),
        ({"mimi_name": 3}, "mimi_name: 3 is no file"),
        ({"mimi_config_name": "none.json"}, "mimi_config_name: 'none.json' is no file"),
    ],
)
def test_names_of_files_that_are_refused(
    document: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / WEIGHTS).touch()
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=f"config.json: {message} of the folder"):
        read_config(tmp_path)


def test_several_files_of_weights_need_a_name(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"tokenizer-{number}-checkpoint5.safetensors").touch()
    with pytest.raises(ConfigError, match=r"2 files match .*; set mimi_name in config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("seanet", "causal", False, "use_causal_conv: False is not supported"),
        ("seanet", "true_skip", False, "use_conv_shortcut: True is not supported"),
        ("seanet", "norm", "weight_norm", "seanet.norm: .*is not one of none"),
        ("seanet", "dimension", 10**9, "seanet.dimension: 1000000000 is not between"),
        ("seanet", "trim_right_ratio", 0.5, "seanet.trim_right_ratio: 0.5 is not between"),
        ("transformer", "causal", False, "transformer.causal: False is not supported"),
        ("transformer", "gating", "silu", "transformer.gating: .*is not one of none"),
        ("transformer", "d_model", 32, "but seanet.dimension is 16; they must be equal"),
        ("quantizer", "bins", "16", "quantizer.bins: expected int"),
    ],
)
def test_values_that_are_refused(
    section: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    golden = FamilyGolden("mimi_of_moshi", "tiny")
    write_model(tmp_path, golden)
    sizes = {**golden.sizes, section: {**golden.sizes[section], key: value}}
    (tmp_path / SIZES).write_text(json.dumps(sizes))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_projections_of_another_shape_are_refused(tmp_path: Path) -> None:
    golden = FamilyGolden("mimi_of_moshi", "tiny")
    write_model(tmp_path, golden)
    name = "decoder_transformer.transformer.layers.1.self_attn.in_projs.0.weight"
    save_file(published_weights(golden) | {name: torch.zeros(5, 16)}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"3 missing: .*q_proj\.weight"):
        check_folder(tmp_path)
