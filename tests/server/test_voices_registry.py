"""Voices by their ids."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from token2wav import InputError, Voice
from token2wav_client import ClientVoice
from token2wav_server.voices import VoiceRegistry


def a_voice(seed: int, prompt_tokens: int = 4) -> Voice:
    rng = np.random.default_rng(seed)
    mel = rng.standard_normal((2 * prompt_tokens, 80))
    return Voice(np.arange(prompt_tokens), mel, rng.standard_normal(192))


def test_equal_content_has_an_equal_id_and_any_difference_another() -> None:
    voice = a_voice(0)
    assert a_voice(0).content_hash == voice.content_hash
    tokens, mel, speaker = (
        np.array(x) for x in (voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)
    )
    others = [
        Voice(tokens[::-1].copy(), mel, speaker),
        Voice(tokens, mel + 1e-6, speaker),
        Voice(tokens, mel, -speaker),
    ]
    others += [Voice([], np.zeros((0, 80)), speaker), a_voice(1)]
    assert len({voice.content_hash, *(other.content_hash for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("prompt_tokens", [0, 1, 30])
def test_the_client_computes_the_same_id(prompt_tokens: int) -> None:
    voice = a_voice(2, prompt_tokens)
    assert (
        ClientVoice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding).id
        == voice.content_hash
    )


def test_a_registered_voice_is_found_by_its_id() -> None:
    registry, voice = VoiceRegistry(2), a_voice(0)
    assert registry.register(voice) == voice.content_hash
    assert registry.get(voice.content_hash) is voice


def test_an_unknown_id_is_refused_by_name() -> None:
    with pytest.raises(
        InputError, match=r"^voice_id: 'abc' is not registered here; send the voice itself once$"
    ):
        VoiceRegistry(2).get("abc")


def test_the_least_recently_used_voice_goes_first() -> None:
    registry = VoiceRegistry(2)
    first, second = (registry.register(a_voice(seed)) for seed in (1, 2))
    registry.get(first)
    third = registry.register(a_voice(3))
    registry.get(first)
    registry.get(third)
    with pytest.raises(InputError):
        registry.get(second)


def test_a_voice_with_a_name_stays_and_is_known_by_its_id_too() -> None:
    registry = VoiceRegistry(1)
    anna = a_voice(0)
    registry.keep("anna", anna)
    for seed in range(1, 4):
        registry.register(a_voice(seed))
    assert registry.register(anna) == anna.content_hash  # sent all the same
    assert registry.named("anna") is anna
    assert registry.get(anna.content_hash) is anna
    assert registry.get(a_voice(3).content_hash)
    assert len(registry) == 1


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    registry = VoiceRegistry(1)
    with pytest.raises(
        InputError, match=r"^voice: 'eve' is not known here; this server has no named voices$"
    ):
        registry.named("eve")
    for number in range(23):
        registry.keep(f"v{number}", a_voice(number))
    with pytest.raises(
        InputError, match=r"voices of this server are v0, v1, .*, v19 and 3 others$"
    ):
        registry.named("eve")
    with pytest.raises(InputError) as refused:
        registry.named("e" * 10_000 + "\n")
    assert len(str(refused.value)) < 300


def test_registering_again_costs_nothing_from_any_thread() -> None:
    registry = VoiceRegistry(10)
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: registry.register(a_voice(0)), range(100)))
    assert len(ids) == len(registry) == 1
