"""Folders of the codec of Pocket TTS that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testkit.models.family_golden import FamilyGolden
from testkit.models.pocket_model import document
from token2wav import ConfigError
from token2wav.families.registry import read_config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("latent_dim", 0, "latent_dim: 0 is not between"),
        ("latent_stride", 10**9, "latent_stride: 1000000000 is not between"),
        ("hidden_act", "relu", "hidden_act"),
        ("upsampling_ratios", [], "empty; at least 1"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    content = {**document(FamilyGolden("pocket_tts", "tiny")), key: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        read_config(tmp_path)
