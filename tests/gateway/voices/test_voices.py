"""Voices: damaged files and full disks of their folder, and recordings that become voices once."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from examples.demo_voice.recordings import PROMPT
from testkit.limits import files_of_at_most
from testkit.patience import PATIENCE_SECONDS
from token2wav_client import ClientVoice
from token2wav_gateway.errors import (
    GatewayError,
    NotAllowedError,
    NotFoundError,
    RequestError,
    StorageError,
)
from token2wav_gateway.settings import VoiceSettings
from token2wav_gateway.voices import listener
from token2wav_gateway.voices.listener import Listener
from token2wav_gateway.voices.voice_folder import Voice, VoiceFolder

FULL = 1000  # bytes of a file on a full disk
TENSORS: dict[str, Any] = {
    "prompt_tokens": np.zeros(3, np.int32),
    "prompt_mel": np.zeros((6, 80), np.float32),
    "speaker_embedding": np.ones(192, np.float32),
}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Recordings that a front end has turned into voices, no two of which are equal."""
    recordings: list[bytes] = []

    def voice_of(_: Listener, recording: bytes, field: str) -> ClientVoice:
        recordings.append(recording)
        embedding = np.full(192, len(recordings), np.float32)
        return ClientVoice(**TENSORS | {"speaker_embedding": embedding})

    monkeypatch.setattr(Listener, "_computed", voice_of)
    return recordings


def folder_with_model(path: Path, default: str | None = None) -> VoiceFolder:
    return VoiceFolder(VoiceSettings(folder=path, model=path, default=default))


def create(
    folder: VoiceFolder, name: str, holder: str | None = None, recording: bytes = b"sound"
) -> None:
    asyncio.run(folder.create(name, "words", recording, holder))


def test_names_of_openais_voices_select_the_default_voice(tmp_path: Path) -> None:
    for name in ("joe", "nova"):
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    folder = VoiceFolder(VoiceSettings(folder=tmp_path, default="joe"))
    names = {"alloy": "joe", "nova": "nova", "joe": "joe", "": "joe"}
    assert {name: folder.get(name).name for name in names} == names


def write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "make",
    [
        write(b"["),
        write(b"[" * 100_000),
        write(b"\xff"),
        write(b"{}"),
        write(b'{"text": "\\ud83d", "created_at": 5}'),
        write(b'{"text": "", "created_at": NaN}'),
        write(b'{"text": "", "created_at": 1e999}'),
        write(b'{"text": "%s", "created_at": 5}' % (b"x" * 70_000)),
        link_to_itself,
        os.mkfifo,
        Path.mkdir,
    ],
)
def test_a_damaged_description_hides_one_voice(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    for name in ("eve", "joe"):
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    make(tmp_path / "eve.json")
    (tmp_path / "joe.json").write_text('{"text": "My words.", "created_at": 5}')
    folder = VoiceFolder(VoiceSettings(folder=tmp_path))
    assert [(voice.name, voice.text, voice.created) for voice in folder.list()] == [
        ("joe", "My words.", 5)
    ]
    with pytest.raises(GatewayError, match=r"^voice eve: its description is damaged$"):
        folder.get("eve")


@pytest.mark.parametrize("make", [link_to_itself, os.mkfifo, Path.mkdir])
def test_an_entry_that_is_no_file_hides_no_other_voice(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    for name in ("Ann Lee", ".hidden", "joe"):
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    make(tmp_path / "eve.safetensors")
    folder = VoiceFolder(VoiceSettings(folder=tmp_path))
    assert [voice.name for voice in folder.list()] == ["joe"]
    with pytest.raises(NotFoundError, match="voice: 'eve' is not one of"):
        folder.get("eve")


def test_a_damaged_voice_is_listed_and_cannot_speak(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"junk")
    folder = VoiceFolder(VoiceSettings(folder=tmp_path))
    assert [voice.name for voice in folder.list()] == ["broken"]
    with pytest.raises(GatewayError, match=r"^voice broken: its file cannot be read$"):
        folder.get("broken")


def test_a_deleted_voice_leaves_the_memory(heard: list[bytes], tmp_path: Path) -> None:
    folder = folder_with_model(tmp_path)
    for name in ("bob", "eve"):
        create(folder, name, recording=name.encode())
    read = weakref.ref(folder.get("bob"))
    folder.delete("bob")
    assert read() is None
    for name in ("eve", "bob"):
        create(folder, f"{name}2", recording=name.encode())
    assert heard == [b"bob", b"eve", b"bob"]


def test_the_default_voice_is_deleted_by_nobody(heard: list[bytes], tmp_path: Path) -> None:
    folder = folder_with_model(tmp_path, default="bob")
    create(folder, "bob", None)
    with pytest.raises(NotAllowedError, match=r"^voice: 'bob' is the default voice"):
        folder.delete("bob")
    assert folder.names() == ["bob"]


def test_a_voice_is_read_again_only_after_it_has_changed(tmp_path: Path) -> None:
    folder = VoiceFolder(VoiceSettings(folder=tmp_path))
    save_file(TENSORS, tmp_path / "bob.safetensors")
    voice = folder.get("bob")
    assert folder.get("bob") is voice
    (tmp_path / "bob.json").write_text('{"text": "words", "created_at": 1}')
    assert folder.get("bob").text == "words"
    save_file(TENSORS | {"speaker_embedding": 2 * TENSORS["speaker_embedding"]}, tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "bob.safetensors")
    tensors = folder.get("bob").tensors
    assert tensors is not None
    assert np.array_equal(tensors.speaker_embedding, 2 * TENSORS["speaker_embedding"])


def test_a_voice_that_is_deleted_while_it_is_read_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = VoiceFolder(VoiceSettings(folder=tmp_path))
    save_file(TENSORS, tmp_path / "bob.safetensors")
    load = ClientVoice.load

    def late(path: Path) -> ClientVoice:
        path.unlink()
        return load(path)

    monkeypatch.setattr(ClientVoice, "load", late)
    with pytest.raises(NotFoundError, match=r"^voice: 'bob' is not one of: no voice yet$"):
        folder.get("bob")


def test_a_folder_that_cannot_be_written(heard: list[bytes], tmp_path: Path) -> None:
    folder = folder_with_model(tmp_path / "voices")
    (tmp_path / "voices").rename(tmp_path / "moved")
    (tmp_path / "voices").write_bytes(b"")
    with pytest.raises(StorageError, match=r"its folder cannot be written$") as caught:
        create(folder, "bob")
    assert caught.value.status == 503
    assert not any(tmp_path.glob("*/*"))


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only")]
)
def test_a_voice_that_cannot_be_deleted_stays(
    heard: list[bytes], error: OSError, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = folder_with_model(tmp_path)
    create(folder, "bob")

    def refuse(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(StorageError, match=r"its folder cannot be written$"):
            folder.delete("bob")
    assert [voice.name for voice in folder.list()] == ["bob"]
    assert folder.get("bob").text == "words"


@pytest.mark.anyio
async def test_a_recording_becomes_a_voice_once(
    heard: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(listener, "_MOST_VOICES", 2)
    folder = folder_with_model(tmp_path)

    async def listen(recording: bytes, text: str) -> Voice:
        return await folder.of_recording(recording, text, "ref_audio")

    same = await asyncio.gather(*(listen(b"a", text) for text in ("x", "", "y")))
    assert heard == [b"a"]
    assert [voice.text for voice in same] == ["x", "", "y"]
    assert same[0].tensors is same[1].tensors
    # Two recordings with the same words are two voices.
    assert (await listen(b"b", "x")).tensors is not same[0].tensors
    await listen(b"a", "x")
    await listen(b"c", "other words")  # b is forgotten
    await listen(b"a", "x")
    assert heard == [b"a", b"b", b"c"]
    await listen(b"b", "x")
    assert len(heard) == 4
    with pytest.raises(RequestError, match=r"^ref_audio: empty; a recording is needed$"):
        await listen(b"", "x")


def test_a_full_disk_is_told_apart_from_a_bad_recording(tmp_path: Path) -> None:
    folder = folder_with_model(tmp_path)
    with files_of_at_most(FULL), pytest.raises(StorageError, match=r"its disk is full$"):
        asyncio.run(folder.of_recording(bytes(10_000), "words", "ref_audio"))


@pytest.mark.anyio
async def test_a_recording_is_hashed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest recording takes 30 ms, in which no other stream would get audio."""
    goes_on = threading.Event()

    def digest(recording: bytes) -> bytes:
        assert goes_on.wait(PATIENCE_SECONDS)
        return recording

    monkeypatch.setattr(listener, "_digest", digest)
    asyncio.get_running_loop().call_later(0.02, goes_on.set)
    knowing = Listener(Path("model"), longest_s=30, most_waiting=1)
    voice = ClientVoice(**TENSORS)
    knowing._known.put(b"sound", (voice.id, voice))
    assert await knowing.voice(b"sound", "file") is voice


def test_a_model_by_name_that_cannot_be_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    nowhere = Listener(Path("acme/nowhere"), longest_s=30, most_waiting=1)
    with pytest.raises(GatewayError, match="file: the model cannot turn it into a voice"):
        nowhere.voice_of(PROMPT.read_bytes(), "file")
