"""`token2wav perf-data`: input of NVIDIA's perf_analyzer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.models.golden import DATA
from token2wav.commands import main
from token2wav_client import ClientVoice

TOKENS, VOICE = DATA / "demo" / "tokens.npy", DATA / "demo" / "voice.safetensors"


@pytest.mark.parametrize(
    ("options", "count"), [([], None), (["--length=60"], 60), (["--length=500"], 500)]
)
def test_perf_data_holds_the_utterance_and_its_voice(
    options: list[str], count: int | None, tmp_path: Path
) -> None:
    """Tokens are cut or repeated to a length."""
    out = tmp_path / "data.json"
    files = [f"--tokens={TOKENS}", f"--voice={VOICE}", f"--out={out}"]
    assert main(["perf-data", *files, *options]) == 0
    [step] = json.loads(out.read_text())["data"]
    tokens, voice = np.load(TOKENS), ClientVoice.load(VOICE)
    expected = {
        "tokens": tokens if count is None else np.resize(tokens, count),
        "prompt_tokens": voice.prompt_tokens,
        "prompt_mel": voice.prompt_mel,
        "speaker_embedding": voice.speaker_embedding,
    }
    assert step.keys() == expected.keys()
    for name, array in expected.items():
        assert step[name]["shape"] == list(array.shape)
        content = np.array(step[name]["content"], array.dtype).reshape(array.shape)
        np.testing.assert_array_equal(content, array)


@pytest.mark.parametrize(
    ("name", "content"), [("tokens", [[1, 2], [3, 4]]), ("latents", [[0.5, 1.5], [2.5, 3.5]])]
)
def test_perf_data_of_a_codec_has_no_voice(name: str, content: list[Any], tmp_path: Path) -> None:
    (tokens := tmp_path / "tokens.json").write_text(json.dumps(content))
    out = tmp_path / "data.json"
    assert main(["perf-data", f"--tokens={tokens}", f"--out={out}"]) == 0
    flat = [value for row in content for value in row]
    assert json.loads(out.read_text()) == {"data": [{name: {"content": flat, "shape": [2, 2]}}]}
