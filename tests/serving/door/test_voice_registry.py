"""Voices of a server: files that it reads at its start, and voices by their ids."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from testkit.models.chatterbox_model import write_conditionals, write_model
from testkit.models.family_golden import FamilyGolden
from testkit.models.tiny_model import TINY, demo_voice
from testkit.utterances import a_voice
from token2wav import ConfigError, InputError, Voice
from token2wav.config import ServerConfig
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.published.registry import read_config
from token2wav.serving.door.voice_registry import VoiceRegistry, voices_in
from token2wav_client import ClientVoice


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
        ("anna.npz", {}, "the name of the file ends neither in .safetensors nor in .pt"),
        ("sub/anna.safetensors", {}, "another voice has the name anna"),
        (f"{64 * 'a'}.safetensors", {}, "its name looks like a voice id"),
        ("an\nna.safetensors", {}, "its name looks like a voice id or is not printable"),
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


def test_equal_ids_for_equal_content_only() -> None:
    voice = a_voice(4, 0)
    assert a_voice(4, 0).content_hash == voice.content_hash
    tokens, mel, speaker = (
        np.array(x) for x in (voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)
    )
    voices = [
        Voice(tokens[::-1].copy(), mel, speaker),
        Voice(tokens, mel + 1e-6, speaker),
        Voice(tokens, mel, -speaker),
    ]
    voices += [Voice([], np.zeros((0, 80)), speaker), a_voice(4, 1)]
    assert len({voice.content_hash, *(other.content_hash for other in voices)}) == 1 + len(voices)


@pytest.mark.parametrize("prompt_tokens", [0, 1, 30])
def test_the_client_computes_the_same_id(prompt_tokens: int) -> None:
    voice = a_voice(prompt_tokens)
    assert (
        ClientVoice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding).id
        == voice.content_hash
    )


def test_the_least_recently_used_voice_goes_first() -> None:
    registry = VoiceRegistry(2, {})
    voices = [a_voice(4, seed) for seed in (1, 2, 3)]
    first, second, third = (voice.content_hash for voice in voices)
    registry.register(voices[0])
    registry.register(voices[1])
    registry.get(first)
    registry.register(voices[2])
    registry.get(first)
    registry.get(third)
    with pytest.raises(InputError):
        registry.get(second)


def test_a_voice_with_a_name_stays_and_is_known_by_its_id_too() -> None:
    anna = a_voice(4, 0)
    registry = VoiceRegistry(1, {"anna": anna})
    for seed in range(1, 4):
        registry.register(a_voice(4, seed))
    registry.register(anna)  # sent although the server knows it
    assert registry.named("anna") is anna
    assert registry.get(anna.content_hash) is anna
    assert registry.get(a_voice(4, 3).content_hash)
    assert len(registry) == 1


def test_an_unknown_name_is_refused_with_the_known_names() -> None:
    registry = VoiceRegistry(1, {})
    with pytest.raises(
        InputError, match=r"^voice: 'eve' is unknown; this server has no named voices$"
    ):
        registry.named("eve")
    registry = VoiceRegistry(1, {f"v{number}": a_voice(4, number) for number in range(23)})
    with pytest.raises(
        InputError, match=r"this server has the voices v0, v1, .*, v19 and 3 others$"
    ):
        registry.named("eve")
    with pytest.raises(InputError) as refused:
        registry.named("e" * 10_000 + "\n")
    assert len(str(refused.value)) < 300


def test_registering_again_costs_nothing_from_any_thread() -> None:
    registry = VoiceRegistry(10, {})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: registry.register(a_voice(4, 0)), range(100)))
    assert len(registry) == 1
