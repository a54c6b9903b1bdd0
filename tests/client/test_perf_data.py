"""`token2wav perf-data`: input of NVIDIA's perf_analyzer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from testkit.models.golden import DATA
from token2wav.commands import main
from token2wav_client import ClientVoice

TOKENS, VOICE = DATA / "demo" / "tokens.npy", DATA / "demo" / "voice.safetensors"


def make(folder: Path, *arguments: str) -> tuple[int, Path]:
    out = folder / "data.json"
    return main(
        ["perf-data", "--tokens", str(TOKENS), "--voice", str(VOICE), "--out", str(out), *arguments]
    ), out


def test_perf_data_holds_the_utterance_and_its_voice(tmp_path: Path) -> None:
    status, out = make(tmp_path)
    assert status == 0
    [step] = json.loads(out.read_text())["data"]
    voice = ClientVoice.load(VOICE)
    expected = {
        "tokens": np.load(TOKENS),
        "prompt_tokens": voice.prompt_tokens,
        "prompt_mel": voice.prompt_mel,
        "speaker_embedding": voice.speaker_embedding,
    }
    assert step.keys() == expected.keys()
    for name, array in expected.items():
        assert step[name]["shape"] == list(array.shape)
        np.testing.assert_array_equal(
            np.array(step[name]["content"], array.dtype).reshape(array.shape), array
        )


@pytest.mark.parametrize(("seconds", "count"), [("2.4", 60), ("20", 500), ("0.001", 1)])
def test_perf_data_cuts_or_repeats_the_tokens(tmp_path: Path, seconds: str, count: int) -> None:
    status, out = make(tmp_path, "--seconds", seconds)
    assert status == 0
    [step] = json.loads(out.read_text())["data"]
    assert step["tokens"] == {
        "content": np.resize(np.load(TOKENS), count).tolist(),
        "shape": [count],
    }


def test_perf_data_names_unusable_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.txt").write_text(" ")
    status, _ = make(tmp_path, "--tokens", str(tmp_path / "none.txt"))
    assert (status, capsys.readouterr().err) == (
        2,
        f"token2wav perf-data: error: {tmp_path / 'none.txt'}: tokens: 0 found; an "
        "utterance needs at least 1\n",
    )
    status, _ = make(tmp_path, "--out", str(tmp_path / "missing" / "data.json"))
    assert status == 2
    assert "cannot be written" in capsys.readouterr().err
