"""Voices of recordings: each recording becomes a voice once, and the latest ones are remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from testkit.limits import files_of_at_most
from tests.gateway.voices.test_voice_folder import FULL, TENSORS, heard
from token2wav_gateway.errors import NotFoundError, StorageError
from token2wav_gateway.settings import VoiceSettings
from token2wav_gateway.voices import listener
from token2wav_gateway.voices.recorded_voices import RecordedVoices

pytestmark = pytest.mark.anyio

__all__ = ["heard"]  # a fixture


async def test_a_recording_becomes_a_voice_once(
    heard: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(listener, "_MOST_VOICES", 2)
    first, second, third = (np.full(4, level, np.float32) for level in (0.1, 0.2, 0.3))

    recorded = RecordedVoices(VoiceSettings(model=tmp_path))
    same = await asyncio.gather(*(recorded.of(first, "words") for _ in range(3)))
    assert len(heard) == 1
    assert len({voice.name for voice in same}) == 1
    assert same[0].tensors is same[1].tensors
    # Two recordings with the same words are two voices.
    assert (await recorded.of(second, "words")).name != same[0].name
    await recorded.of(first, "words")
    await recorded.of(third, "other words")  # the second one is forgotten
    await recorded.of(first, "words")
    assert len(heard) == 3
    await recorded.of(second, "words")
    assert len(heard) == 4


def test_the_default_voice_of_the_folder(tmp_path: Path) -> None:
    async def default() -> str:
        folder = tmp_path / "voices"
        recorded = RecordedVoices(VoiceSettings(model=tmp_path, folder=folder))
        with pytest.raises(NotFoundError):
            await recorded.of(None, "")
        save_file(TENSORS, folder / "default.safetensors")
        return (await recorded.of(None, "")).name

    assert asyncio.run(default()) == "default"


def test_a_full_disk_is_told_apart_from_a_bad_recording(tmp_path: Path) -> None:
    recorded = RecordedVoices(VoiceSettings(model=tmp_path))
    with files_of_at_most(FULL), pytest.raises(StorageError, match=r"its disk is full$"):
        asyncio.run(recorded.of(np.zeros(10_000, np.float32), "words"))
