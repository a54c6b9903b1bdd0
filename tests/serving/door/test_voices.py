"""Voices that clients send: the server keeps the latest ones, and refuses the ids of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from testkit.door import Door, audio_of, named
from testkit.models.tiny_model import demo_tokens, demo_voice
from token2wav import Token2Wav, Voice
from token2wav.config import LimitConfig, ServerConfig
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
