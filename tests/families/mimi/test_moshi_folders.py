"""Mimi in the folders of `moshi`."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.models.moshi_model import WEIGHTS
from token2wav import ConfigError
from token2wav.families.mimi.config import MimiSizes
from token2wav.published.registry import read_config


def test_sizes_default_to_those_of_the_package(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).touch()
    config = read_config(tmp_path)
    assert (config.sample_rate, config.token_frame_rate, config.tokens.shape) == (
        24000,
        12.5,
        (32,),
    )
    assert config.stage_config("decoder") == MimiSizes()


def test_several_files_of_weights_need_a_name(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"tokenizer-{number}-checkpoint5.safetensors").touch()
    with pytest.raises(ConfigError, match=r"2 files match .*; set mimi_name in config\.json"):
        read_config(tmp_path)
