"""Voices hold read-only copies of their arrays. An error names the wrong field."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from torch import nn

from testkit.models.tiny_model import demo_voice
from token2wav import InputError, Voice
from token2wav.config.model_config import ModelConfig
from token2wav.families.cosyvoice3 import CosyVoice3Config

FIELDS = ("prompt_tokens", "prompt_mel", "speaker_embedding")


def arguments() -> dict[str, Any]:
    voice = demo_voice(4)
    return {field: getattr(voice, field).copy() for field in FIELDS}


def mel_with(value: float) -> Any:
    mel = np.zeros((8, 80))
    mel[0, 5] = value
    return mel


def embedding_with(value: float) -> Any:
    embedding = np.ones(192)
    embedding[5] = value
    return embedding


TOKENS, MEL, SPEAKER = FIELDS
BAD: list[tuple[str, Any, str]] = [
    (TOKENS, np.zeros((1, 1, 4), np.int32), r"shape \(1, 1, 4\), expected one or two dimensions"),
    (TOKENS, [1.0, 2.0], "type float64, expected integers"),
    (TOKENS, [[1], [2, 3]], "rows of different lengths"),
    (TOKENS, [1 << 35], "32 bits"),
    (TOKENS, [1 << 64], "32 bits; found 18446744073709551616"),
    (MEL, np.zeros(640), r"shape \(640,\), expected 2 dimensions"),
    (MEL, np.zeros((1, 8, 80)), r"shape \(1, 8, 80\), expected 2 dimensions"),
    (MEL, mel_with(np.nan), "NaN or infinite"),
    (MEL, mel_with(1e300), "NaN or infinite"),
    (MEL, mel_with(1e30), r"1e\+30 at index 0, 5 is outside -100 to 100$"),
    (MEL, mel_with(-101), "-101 at index 0, 5 is outside"),
    (MEL, [["1"]], "type <U1, expected real numbers"),
    (MEL, [[True]], "type bool, expected real numbers"),
    (MEL, [[1j]], "type complex128, expected real numbers"),
    (MEL, [[1.0], [1.0, 2.0]], "rows of different lengths"),
    (MEL, None, "type object, expected real numbers"),
    (SPEAKER, embedding_with(-2000), "-2000 at index 5 is outside -1000 to 1000$"),
    (SPEAKER, np.ones((1, 192)), r"shape \(1, 192\), expected 1 dimension$"),
    (SPEAKER, embedding_with(-np.inf), "NaN or infinite"),
    (SPEAKER, torch.ones(192, requires_grad=True), "not an array: "),
]


@pytest.mark.parametrize(("field", "value", "words"), BAD)
def test_a_bad_argument_is_refused_by_name(field: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: .*{words}") as caught:
        Voice(**{**arguments(), field: value})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


MISFITS: list[tuple[str, Any, str]] = [
    (TOKENS, [0, 6560, 6561, 0], "6561 at index 2 .* 0 to 6560"),
    (TOKENS, [0, 0, 0, -1], "-1 at index 3 .* 0 to 6560"),
    (TOKENS, [1, 2, 3], r"shape \(8, 80\), expected 6 frames of 80 bands for 3 prompt tokens"),
    (MEL, np.zeros((7, 80)), r"shape \(7, 80\), expected 8 frames of 80 bands for 4"),
    (MEL, np.zeros((80, 8)), r"shape \(80, 8\), expected 8 frames"),
    (MEL, np.zeros((0, 80)), r"shape \(0, 80\), expected 8 frames"),
    (SPEAKER, np.ones(256), r"shape \(256,\), expected \(192,\)"),
    (SPEAKER, np.zeros(192), "all values are 0"),
]


@pytest.mark.parametrize(("field", "value", "words"), MISFITS)
def test_a_voice_of_another_model_is_refused_by_name(
    config: CosyVoice3Config, field: str, value: Any, words: str
) -> None:
    voice = Voice(**{**arguments(), field: value})
    refused = "prompt_mel" if words.startswith("shape") and field == "prompt_tokens" else field
    with pytest.raises(InputError, match=f"^{refused}: .*{words}") as caught:
        voice.check(config)
    assert caught.value.field == refused


def test_prompts_are_limited(config: ModelConfig) -> None:
    with pytest.raises(InputError, match=r"^prompt_tokens: 751 tokens; at most 750"):
        demo_voice(751).check(config)


def test_a_voice_keeps_copies_that_nobody_can_change() -> None:
    arrays = arguments()
    voice = Voice(**arrays)
    before = {field: getattr(voice, field).copy() for field in FIELDS}
    for array in arrays.values():
        array[:] = 1
    for field in FIELDS:
        field_array = getattr(voice, field)
        assert np.array_equal(field_array, before[field])
        with pytest.raises(ValueError, match="read-only"):
            field_array[0] = 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(voice, field, field_array)
    assert arrays["prompt_mel"].flags.writeable  # the caller's own array is not frozen


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read as a voice \(No such file"),
        (b"", r"cannot be read as a voice \("),
        (b"garbage" * 100, r"cannot be read as a voice \("),
        ({MEL: None}, f"{MEL}: missing; a voice has {TOKENS}, {MEL}, {SPEAKER}"),
        ({TOKENS: np.ones(4, np.float32)}, f"{TOKENS}: type float32, expected integers"),
        ({SPEAKER: np.full(192, np.nan)}, f"{SPEAKER}: holds NaN or infinite values"),
    ],
)
def test_a_file_that_is_no_voice_is_named(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "v.safetensors"
    if isinstance(content, dict):
        arrays = arguments() | content
        save_file({name: array for name, array in arrays.items() if array is not None}, path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"^{path}: {message}"):
        Voice.load(path)


def test_numbers_of_16_bits_are_read(tmp_path: Path) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in arguments().items()}
    for dtype in (torch.bfloat16, torch.float16):
        mel = arrays[MEL].to(dtype)
        save_tensors(arrays | {MEL: mel}, tmp_path / "v.safetensors")
        voice = Voice.load(tmp_path / "v.safetensors")
        assert np.array_equal(voice.prompt_mel, mel.float().numpy())
    save_tensors(arrays | {MEL: mel.to(torch.float8_e4m3fn)}, tmp_path / "v.safetensors")
    with pytest.raises(InputError, match=f"^{tmp_path}/v.safetensors: {MEL}: not an array"):
        Voice.load(tmp_path / "v.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prompt_token", [1, 2], "gen: prompt_token is no dense tensor$"),
        (
            "prompt_token",
            torch.zeros(1, 4).bfloat16(),
            f"{TOKENS}: type float32, expected integers",
        ),
        ("prompt_feat", None, "gen: prompt_feat is no dense tensor$"),
        ("prompt_feat", torch.zeros(8, 80).to_sparse(), "gen: prompt_feat is no dense tensor$"),
        ("prompt_feat", torch.tensor(1.0), f"{MEL}: .* expected 2 dimensions$"),
        ("embedding", "x", "gen: embedding is no dense tensor$"),
        ("embedding", torch.ones(1, 192, device="meta"), f"{SPEAKER}: not an array: "),
        (
            "embedding",
            torch.ones(1, 192) * 1j,
            f"{SPEAKER}: type complex64, expected real numbers$",
        ),
        ("embedding", nn.Parameter(torch.ones(1, 192)), None),
    ],
)
def test_the_tensors_of_conditionals(
    tmp_path: Path, name: str, value: Any, message: str | None
) -> None:
    path = tmp_path / "conds.pt"
    section = {
        "prompt_token": torch.zeros(1, 4, dtype=torch.long),
        "prompt_feat": torch.zeros(1, 8, 80),
        "embedding": torch.ones(1, 192),
    }
    torch.save({"gen": section | {name: value}}, path)
    if message is None:
        assert Voice.load(path).speaker_embedding.all()
        return
    with pytest.raises(InputError, match=f"^{path}: {message}"):
        Voice.load(path)
