"""Voice files: both formats, and every way in which a file can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

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
    ("prompt_mel", np.zeros((0, 80), F32), r"shape \(0, 80\), expected frames for 4 tokens"),
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
