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


@pytest.mark.parametrize(
    ("options", "count"),
    [([], None), (["--seconds=2.4"], 60), (["--seconds=20"], 500), (["--seconds=0.001"], 1)],
)
def test_perf_data_holds_the_utterance_and_its_voice(
    options: list[str], count: int | None, tmp_path: Path
) -> None:
    """Tokens are cut or repeated to a number of seconds."""
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
