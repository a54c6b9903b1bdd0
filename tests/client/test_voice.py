"""Voice files: both formats, and every way in which a file can be wrong."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from tests.client.hostile import memory_within, npy_header
from token2wav_client.errors import VoiceError
from token2wav_client.voice import ClientVoice, check_known_voice

Arrays = dict[str, npt.NDArray[Any]]


def save(path: Path, arrays: Arrays) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    else:
        save_file(arrays, path)
    return path


@pytest.mark.parametrize("name", ["v.npz", "v.safetensors"])
def test_both_formats_give_the_same_voice(tmp_path: Path, name: str, voice_arrays: Arrays) -> None:
    voice = ClientVoice.load(save(tmp_path / name, voice_arrays))
    for field, array in voice_arrays.items():
        np.testing.assert_array_equal(getattr(voice, field), array)
    assert voice.prompt_tokens.dtype == np.int32
    assert voice.prompt_mel.dtype == voice.speaker_embedding.dtype == np.float32


def test_other_float_types_are_converted(voice_arrays: Arrays) -> None:
    voice_arrays["prompt_mel"] = np.asfortranarray(voice_arrays["prompt_mel"].astype(np.float64))
    voice = ClientVoice(**voice_arrays)
    assert voice.prompt_mel.dtype == np.float32
    assert voice.prompt_mel.flags.c_contiguous


F32 = np.float32
WRONG: list[tuple[str, npt.NDArray[Any], str]] = [
    ("prompt_tokens", np.array([1, 2, 3, -4]), "-4 is outside 0"),
    ("prompt_tokens", np.ones(4, F32), "dtype float32, expected integers"),
    ("prompt_tokens", np.ones((1, 1, 4), np.int32), r"shape \(1, 1, 4\)"),
    ("prompt_mel", np.zeros((7, 80), F32), r"shape \(7, 80\), .* each of 4 tokens"),
    ("prompt_mel", np.zeros((0, 80), F32), r"shape \(0, 80\), .* each of 4 tokens"),
    ("prompt_mel", np.zeros(640, F32), r"shape \(640,\), expected 2 dimensions"),
    ("prompt_mel", np.zeros((8, 80), np.int32), "dtype int32, expected float32"),
    ("prompt_mel", np.full((8, 80), np.nan, F32), ".* not finite"),
    ("prompt_mel", np.full((8, 80), 1e300), ".* not finite"),
    ("speaker_embedding", np.zeros((1, 192), F32), ".*expected 1 dimension$"),
    ("speaker_embedding", np.zeros(0, F32), r"shape \(0,\)"),
    ("speaker_embedding", np.full(192, np.inf, F32), ".* not finite"),
]


@pytest.mark.parametrize(("field", "value", "words"), WRONG)
def test_a_wrong_field_is_named_with_its_bound(
    tmp_path: Path, voice_arrays: Arrays, field: str, value: npt.NDArray[Any], words: str
) -> None:
    arrays, message = voice_arrays | {field: value}, f"{field}: {words}"
    with pytest.raises(VoiceError, match=message):
        ClientVoice(**arrays)
    path = save(tmp_path / "v.npz", arrays)
    with pytest.raises(VoiceError, match=f"{path}: {message}"):
        ClientVoice.load(path)


@pytest.mark.parametrize("name", ["v.npz", "v.safetensors"])
@pytest.mark.parametrize("field", ["prompt_tokens", "prompt_mel", "speaker_embedding"])
def test_a_missing_field_is_named(
    tmp_path: Path, name: str, field: str, voice_arrays: Arrays
) -> None:
    del voice_arrays[field]
    with pytest.raises(VoiceError, match=f"{field}: missing"):
        ClientVoice.load(save(tmp_path / name, voice_arrays))


@pytest.mark.parametrize("name", ["v.npz", "v.safetensors"])
@pytest.mark.parametrize(
    "content", [None, b"", b"garbage" * 100, b"PK\x03\x04broken", b"\xff" * 64]
)
def test_an_unreadable_file_is_one_sentence(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(VoiceError, match=name):
        ClientVoice.load(tmp_path / name)


def archive(**contents: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as members:
        for name, content in contents.items():
            members.writestr(f"{name}.npy", content)
    return file.getvalue()


def safetensors_header(**tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


ENDLESS = {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}
BFLOAT = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}
HOSTILE = {
    archive(prompt_mel=npy_header(f"({10**12}, 80)")): "the header announces",
    archive(prompt_mel=bytes(100 << 20)): "prompt_mel has more than 64 MiB",
    archive(prompt_mel=npy_header("(" * 4000 + ")" * 4000)): "cannot read the voice",
    safetensors_header(prompt_mel=ENDLESS): "cannot read the voice",
    (2**60).to_bytes(8, "little"): "header too large",
    (10**5).to_bytes(8, "little") + b"[" * 10**5: "cannot read the voice",
    safetensors_header(prompt_mel=BFLOAT) + b"ab": "type 'BF16' is unknown",
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.items(), ids=HOSTILE.values())
def test_a_hostile_file_is_refused_before_it_takes_memory(
    tmp_path: Path, content: bytes, message: str
) -> None:
    name = "v.npz" if content.startswith(b"PK") else "v.safetensors"
    (tmp_path / name).write_bytes(content)
    with memory_within(256 << 20), pytest.raises(VoiceError, match=message) as caught:
        ClientVoice.load(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize("name", ["v.npz", "v.safetensors"])
def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 10**11)  # a sparse file, which takes no room on disk
    with memory_within(256 << 20), pytest.raises(VoiceError, match="the file has more than 64 MiB"):
        ClientVoice.load(tmp_path / name)


def test_an_array_file_that_calls_itself_an_archive_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "v.npz").open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(VoiceError, match=r"cannot read the voice \(File is not a zip file\)"):
        ClientVoice.load(tmp_path / "v.npz")


def test_pickled_fields_are_refused(tmp_path: Path, voice_arrays: Arrays) -> None:
    path = save(tmp_path / "v.npz", voice_arrays | {"prompt_tokens": np.array([1, None, 2, 3])})
    with pytest.raises(VoiceError, match="cannot read the voice"):
        ClientVoice.load(path)


def test_another_suffix_is_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    with pytest.raises(VoiceError, match=r"\.npz or \.safetensors"):
        ClientVoice.load(tmp_path / "voice.pt")


@pytest.mark.parametrize("known", ["anna", "Änne 2", "0" * 64])
def test_a_text_may_be_an_id_or_a_name(known: str) -> None:
    check_known_voice(known)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "voice.safetensors",
            r"'voice\.safetensors' is a file, not a name; load it with ClientVoice\.load",
        ),
        ("voice.npz", "is a file, not a name"),
        ("", "'' is neither a voice id nor a valid voice name"),
        ("a\nb", "is neither a voice id nor a valid voice name"),
        ("\udcff", "is neither a voice id nor a valid voice name"),
        ("a" * 256, "is neither a voice id nor a valid voice name"),
    ],
)
def test_other_text_is_no_voice(text: str, message: str) -> None:
    with pytest.raises(VoiceError, match=message):
        check_known_voice(text)
