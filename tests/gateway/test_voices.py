"""Voices of recordings: each recording becomes a voice once, and the latest ones are remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from token2wav_gateway import voices
from token2wav_gateway.errors import GatewayError, NotFoundError
from token2wav_gateway.settings import VoiceSettings
from token2wav_gateway.voices import Listener, RecordedVoices, VoiceFolder

TENSORS = {
    "prompt_tokens": np.zeros(3, np.int32),
    "prompt_mel": np.zeros((6, 80), np.float32),
    "speaker_embedding": np.ones(192, np.float32),
}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bytes]:
    """Recordings that a front end has turned into voices."""
    recordings: list[bytes] = []

    @contextmanager
    def voice_of(listener: Listener, recording: bytes, field: str) -> Iterator[Path]:
        recordings.append(recording)
        path = tmp_path / "voice.safetensors"
        save_file(TENSORS, path)
        yield path

    monkeypatch.setattr(Listener, "voice_of", voice_of)
    return recordings


def test_a_recording_becomes_a_voice_once(
    heard: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(voices, "_MOST_VOICES", 2)
    first, second, third = (np.full(4, level, np.float32) for level in (0.1, 0.2, 0.3))

    async def listen() -> None:
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

    asyncio.run(listen())


def test_the_default_voice_of_the_folder(heard: list[bytes], tmp_path: Path) -> None:
    async def default() -> str:
        folder = tmp_path / "voices"
        recorded = RecordedVoices(VoiceSettings(model=tmp_path, folder=folder))
        with pytest.raises(NotFoundError):
            await recorded.of(None, "")
        with Listener(tmp_path, 1.0).voice_of(b"", "recording") as path:
            path.rename(folder / "default.safetensors")
        return (await recorded.of(None, "")).name

    assert asyncio.run(default()) == "default"


def test_names_of_openais_voices_select_the_default_voice(tmp_path: Path) -> None:
    for name in ("joe", "nova"):
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    folder = VoiceFolder(VoiceSettings(folder=tmp_path, default="joe"))
    assert [folder.get(name).name for name in ("alloy", "nova", "joe")] == ["joe", "nova", "joe"]
    with pytest.raises(NotFoundError, match="'ann' is not one of: joe, nova"):
        folder.get("ann")
    with pytest.raises(NotFoundError, match="'alloy' is not one of: joe, nova"):
        VoiceFolder(VoiceSettings(folder=tmp_path)).get("alloy")


def test_files_that_are_no_voices_do_not_hide_the_others(tmp_path: Path) -> None:
    for name in ("Ann Lee", ".hidden", "broken", "eve", "joe"):
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"junk")
    (tmp_path / "eve.json").write_text("[")
    (tmp_path / "joe.json").write_text('{"text": "My words.", "created_at": 5}')
    folder = VoiceFolder(VoiceSettings(folder=tmp_path))
    assert folder.names() == ["broken", "eve", "joe"]
    assert [(voice.name, voice.text) for voice in folder.list()] == [
        ("broken", ""),
        ("joe", "My words."),
    ]
    assert folder.get("joe").created == 5
    for name, reason in (("broken", "its file cannot be read"), ("eve", "is damaged")):
        with pytest.raises(GatewayError, match=f"^voice {name}: its [a-z ]+$") as caught:
            folder.get(name)
        assert reason in str(caught.value)


def test_a_full_disk_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        voices._write(tmp_path / "joe.safetensors", b"voice")
    assert list(tmp_path.iterdir()) == []
