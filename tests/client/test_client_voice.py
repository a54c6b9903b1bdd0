"""Voices: both file formats, and every way to get one wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from token2wav_client.errors import VoiceError
from token2wav_client.voice import ClientVoice

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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_tokens", np.array([1, 2, 3, -4]), "prompt_tokens: -4 is outside 0"),
        ("prompt_tokens", np.ones(4, np.float32), "prompt_tokens: dtype float32, expected integers"),
        ("prompt_tokens", np.ones((1, 1, 4), np.int32), r"prompt_tokens: shape \(1, 1, 4\)"),
        ("prompt_mel", np.zeros((7, 80), np.float32), r"prompt_mel: shape \(7, 80\), .* each of 4 tokens"),
        ("prompt_mel", np.zeros((0, 80), np.float32), r"prompt_mel: shape \(0, 80\), .* each of 4 tokens"),
        ("prompt_mel", np.zeros(640, np.float32), r"prompt_mel: shape \(640,\), expected 2 dimensions"),
        ("prompt_mel", np.zeros((8, 80), np.int32), "prompt_mel: dtype int32, expected float32"),
        ("prompt_mel", np.full((8, 80), np.nan, np.float32), "prompt_mel: .* not finite"),
        ("prompt_mel", np.full((8, 80), 1e300), "prompt_mel: .* not finite"),
        ("speaker_embedding", np.zeros((1, 192), np.float32), r"speaker_embedding: .*expected 1 dimension$"),
        ("speaker_embedding", np.zeros(0, np.float32), r"speaker_embedding: shape \(0,\)"),
        ("speaker_embedding", np.full(192, np.inf, np.float32), "speaker_embedding: .* not finite"),
    ],
)
def test_a_wrong_field_is_named_with_its_bound(
    tmp_path: Path, voice_arrays: Arrays, field: str, value: npt.NDArray[Any], message: str
) -> None:
    arrays = voice_arrays | {field: value}
    with pytest.raises(VoiceError, match=message):
        ClientVoice(**arrays)
    path = save(tmp_path / "v.npz", arrays)
    with pytest.raises(VoiceError, match=f"{path}: {message}"):
        ClientVoice.load(path)


@pytest.mark.parametrize("name", ["v.npz", "v.safetensors"])
@pytest.mark.parametrize("field", ["prompt_tokens", "prompt_mel", "speaker_embedding"])
def test_a_missing_field_is_named(tmp_path: Path, name: str, field: str, voice_arrays: Arrays) -> None:
    del voice_arrays[field]
    with pytest.raises(VoiceError, match=f"{field}: missing"):
        ClientVoice.load(save(tmp_path / name, voice_arrays))


@pytest.mark.parametrize("name", ["v.npz", "v.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"garbage" * 100, b"PK\x03\x04broken", b"\xff" * 64])
def test_an_unreadable_file_is_one_sentence(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(VoiceError, match=name):
        ClientVoice.load(tmp_path / name)


def test_an_array_file_that_calls_itself_an_archive_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "v.npz").open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(VoiceError, match=r"not an \.npz archive"):
        ClientVoice.load(tmp_path / "v.npz")


def test_pickled_fields_are_refused(tmp_path: Path, voice_arrays: Arrays) -> None:
    path = save(tmp_path / "v.npz", voice_arrays | {"prompt_tokens": np.array([1, None, 2, 3])})
    with pytest.raises(VoiceError, match="cannot read the voice"):
        ClientVoice.load(path)


def test_another_suffix_is_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    with pytest.raises(VoiceError, match=r"\.npz or \.safetensors"):
        ClientVoice.load(tmp_path / "voice.pt")
