"""Voices of a server: files that it reads at its start, and voices that clients send. The server
keeps the latest ones, and refuses the ids of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from testkit.door import Door, audio_of, named
from testkit.models.chatterbox_model import write_conditionals, write_model
from testkit.models.family_golden import FamilyGolden
from testkit.models.tiny_model import TINY, demo_tokens, demo_voice
from testkit.utterances import a_voice
from token2wav import ConfigError, InputError, Token2Wav, Voice
from token2wav.config import LimitConfig, ServerConfig
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.published.registry import read_config
from token2wav.serving.door.voice_registry import VoiceRegistry, voices_in
from token2wav.voice import FIELDS

STREAMS = 2
KEPT = 4 * STREAMS
UNKNOWN = "is not registered here; send the voice itself once"


@pytest.fixture
def door(model: Token2Wav) -> Iterator[Door]:
    with Door.open(model, ServerConfig(limits=LimitConfig(streams=STREAMS))) as door:
        yield door


def variant(number: int) -> Voice:
    """Returns a voice without a prompt, a different one for each number."""
    embedding = demo_voice(0).speaker_embedding + np.float32(number / 64)
    return Voice(np.zeros(0, np.int32), np.zeros((0, 80), np.float32), embedding)


def test_the_latest_voices_are_kept_and_a_stream_keeps_its_own(door: Door) -> None:
    kept_open = door.send(demo_tokens(28), variant(0), "first", start=True)
    for number in range(1, 3 * KEPT):
        assert len(audio_of([door.send([number], variant(number))])) == 960
    for number in (0, 2 * KEPT - 1):
        assert door.refusal([1], named(variant(number).content_hash)).endswith(UNKNOWN)
    for number in (2 * KEPT, 3 * KEPT - 1):
        assert len(audio_of([door.send([1], named(variant(number).content_hash))])) == 960
    rest = door.send([], None, "first", end=True)
    assert len(audio_of([kept_open, rest])) == 28 * 960


def test_a_voice_of_a_refused_client_is_not_kept(door: Door) -> None:
    """Neither if no stream is free, nor if its prompt is too long."""
    opened = [door.send([1], variant(0), name, start=True) for name in ("one", "two")]
    too_long = Voice(np.zeros(751, np.int32), np.zeros((1502, 80)), np.ones(192))
    for voice, message in (
        (variant(1), "streams: all 2 are in use; try again later"),
        (too_long, "prompt_tokens: 751 tokens; at most 750 are allowed"),
    ):
        assert door.refusal([1], voice) == message
    rest = [door.send([], None, name, end=True) for name in ("one", "two")]
    for first, last in zip(opened, rest, strict=True):
        assert len(audio_of([first, last])) == 960
    for voice in (variant(1), too_long):
        assert door.refusal([1], named(voice.content_hash)).endswith(UNKNOWN)


def test_prompts_of_the_settings_are_computed_before_the_first_message(
    model: Token2Wav, tmp_path: Path
) -> None:
    anna = demo_voice(26)  # of no other test
    save_file({name: getattr(anna, name) for name in FIELDS}, tmp_path / "anna.safetensors")
    before = model.pipeline.usage()
    with Door.open(model, ServerConfig(voices=(str(tmp_path / "anna.safetensors"),))) as door:
        assert model.pipeline.usage().prompt_misses == before.prompt_misses + 1
        assert len(audio_of([door.send([1], "anna")])) == 960
        usage = model.pipeline.usage()
    assert usage.prompt_misses == before.prompt_misses + 1
    assert usage.prompt_hits == before.prompt_hits + 1


def saved(path: Path, length: int = 4, **changes: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    save_file(vars(demo_voice(length)) | changes, path)
    return str(path)


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
