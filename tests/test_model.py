"""The library's model: whole utterances, mels and their audio, and refused arguments."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from testkit.models.folders import write_folder
from testkit.models.tiny_model import TINY, demo_tokens, demo_voice
from testkit.replies import Expected
from token2wav import ConfigError, InputError, RuntimeConfig, Token2Wav, Voice
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.options import UtteranceOptions


@pytest.mark.parametrize(
    "convert",
    [
        lambda tokens: tokens.tolist(),
        lambda tokens: tuple(tokens.tolist()),
        *(lambda tokens, kind=kind: tokens.astype(kind) for kind in ("i2", "i8", "u8", ">i4")),
        lambda tokens: np.repeat(tokens, 2)[::2],
        lambda tokens: torch.from_numpy(tokens),
        lambda tokens: torch.from_numpy(tokens).long(),
    ],
)
def test_tokens_of_any_integer_type_give_the_same_audio(
    model: Token2Wav, voice: Voice, expected: Expected, convert: Callable[[NDArray[np.int32]], Any]
) -> None:
    assert np.array_equal(model.synthesize(convert(demo_tokens(4)), voice), expected(4))


@pytest.mark.parametrize(
    "context",
    [torch.autocast("cpu", torch.bfloat16), torch.device("meta")],
    ids=["autocast", "device"],
)
def test_a_context_of_the_caller_changes_nothing(
    model: Token2Wav, voice: Voice, expected: Expected, context: Any
) -> None:
    with context:
        assert np.array_equal(model.synthesize(demo_tokens(4), voice), expected(4))


def test_another_default_dtype_is_refused(model: Token2Wav, voice: Voice, tmp_path: Path) -> None:
    folder = write_folder("snac", tmp_path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(ConfigError, match=r"torch: the default dtype is torch\.bfloat16"):
            model.synthesize(demo_tokens(4), voice)
        with pytest.raises(ConfigError, match=r"torch: the default dtype is torch\.bfloat16"):
            Token2Wav.load(folder)
    finally:
        torch.set_default_dtype(torch.float32)


def test_audio_in_another_format(model: Token2Wav, voice: Voice, expected: Expected) -> None:
    options = UtteranceOptions(audio_format=AudioFormat("int16", 8000))
    audio = model.synthesize(demo_tokens(4), voice, options)
    assert audio.dtype == np.int16
    assert len(audio) == len(expected(4)) // 3


def test_the_probe_names_the_setting_of_a_cache_without_room_for_a_stream() -> None:
    model = Token2Wav.load(TINY, runtime=RuntimeConfig(device="cpu", cache_mib=1))
    problem = r"^runtime\.cache_mib: the cache has room for 1 of the pages of 1\.0 MiB, and a "
    with pytest.raises(ConfigError, match=problem):
        model.probe()


def test_whole_mel_and_vocode_have_the_lengths_of_their_input(
    model: Token2Wav, voice: Voice
) -> None:
    mel = model.mel(demo_tokens(10), voice)
    assert mel.shape == (80, 20)
    assert mel.dtype == np.float32
    audio = model.vocode(mel)
    assert audio.shape == (480 * 20,)
    assert np.array_equal(audio, model.vocode(mel.astype(np.float64)))


@pytest.mark.parametrize(
    ("mel", "words"),
    [
        (np.zeros((20, 80)), r"\(20, 80\), expected \(80, frames\)"),
        (np.zeros((80, 0)), "at least 1 frame"),
        (np.zeros((1, 80, 4)), "2 dimensions"),
        (np.full((80, 4), np.nan), "NaN or infinite"),
        (np.full((80, 4), 1e39), "NaN or infinite"),
        ([[1.0], [1.0, 2.0]], "rows of different lengths"),
        ("mel", "type <U3, expected real numbers"),
    ],
)
def test_a_bad_mel_is_refused(model: Token2Wav, mel: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^mel: .*{words}"):
        model.vocode(mel)


def test_a_model_of_one_stage_has_no_mel(tmp_path: Path) -> None:
    codec = Token2Wav.load(write_folder("mimi", tmp_path))
    sentence = "this model has no such stage; its stages are decoder"
    with pytest.raises(ConfigError, match=f"flow: {sentence}"):
        codec.mel(np.zeros((3, 4), np.int32), demo_voice(0))
    with pytest.raises(ConfigError, match=f"vocoder: {sentence}"):
        codec.vocode(np.zeros((2, 5), np.float32))


@pytest.mark.parametrize("device", ["cuda:99", "cuda:4000", "cuda:99999999999999999999", "cuda:01"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=f"^runtime.device: '{device}'"):
        Token2Wav.load(str(TINY), runtime=RuntimeConfig(device=device))


def test_an_input_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(InputError("tokens", "none given")))
    assert isinstance(error, InputError)
    assert (str(error), error.field) == ("tokens: none given", "tokens")
