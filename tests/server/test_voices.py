"""Voices that a server knows from the start: each file is checked before anything is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.chatterbox_model import write_conditionals, write_model
from tests.support.family_golden import FamilyGolden
from tests.support.tiny_model import TINY, demo_voice
from token2wav import ConfigError
from token2wav.config import ServerConfig
from token2wav.families import read_config
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav_server.voices import voices_in


def saved(path: Path, length: int = 4, **changes: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    save_file(vars(demo_voice(length)) | changes, path)
    return str(path)


def test_voices_have_the_names_of_their_files(tmp_path: Path) -> None:
    files = saved(tmp_path / "anna.safetensors"), saved(tmp_path / "Bob 2.safetensors", 8)
    voices = voices_in(ServerConfig(voices=files), CosyVoice3Config.read(TINY))
    assert {name: len(voice.prompt_tokens) for name, voice in voices.items()} == {
        "anna": 4,
        "Bob 2": 8,
    }


def test_conditionals_of_chatterbox_are_voices(tmp_path: Path) -> None:
    golden = FamilyGolden("chatterbox", "tiny")
    files = (str(write_conditionals(tmp_path / "builtin.pt", golden)),)
    model = read_config(write_model(tmp_path, golden))
    assert {
        name: len(voice.prompt_tokens)
        for name, voice in voices_in(ServerConfig(voices=files), model).items()
    } == {"builtin": 25}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("anna.npz", {}, "its name ends neither in .safetensors nor in .pt"),
        ("sub/anna.safetensors", {}, "another voice has the name anna"),
        (f"{64 * 'a'}.safetensors", {}, "its name cannot be told from an id"),
        ("an\nna.safetensors", {}, "its name cannot be told from an id, or not be printed"),
        (
            "eve.safetensors",
            {"prompt_tokens": np.full(4, 6561, np.int32)},
            "prompt_tokens: 6561 at index 0 is outside the vocabulary 0 to 6560",
        ),
        (
            "eve.safetensors",
            {"speaker_embedding": np.ones(80, np.float32)},
            "speaker_embedding: shape",
        ),
        ("eve.safetensors", {"prompt_mel": np.zeros((3, 80), np.float32)}, "prompt_mel: shape"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    files = saved(tmp_path / "anna.safetensors"), saved(tmp_path / name, **changes)
    with pytest.raises(ConfigError) as refused:
        voices_in(ServerConfig(voices=files), CosyVoice3Config.read(TINY))
    assert str(refused.value).startswith(f"voices: {tmp_path / name}: {message}")


def test_a_prompt_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    files = (saved(tmp_path / "anna.safetensors", 751),)
    with pytest.raises(
        ConfigError, match=r"anna\.safetensors: prompt_tokens: 751 tokens, at most 750 are allowed"
    ):
        voices_in(ServerConfig(voices=files), CosyVoice3Config.read(TINY))
