"""Mel of Chatterbox in streams against that of whole utterances: under the block mask, and in windows.

Random weights of the public sizes, a prompt of 3 s and 6 s of speech.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.environment import describe, save
from scripts.public_families import Sizes
from tests.support.chatterbox_model import write_model
from tests.support.utterances import a_voice, some_tokens
from token2wav import RuntimeConfig, Token2Wav

_PROMPT, _SPEECH, _HOP, _AHEAD = 75, 150, 25, 25  # tokens


def measure(*, mean_flow: bool) -> dict[str, dict[str, float]]:
    """Compares both ways with the whole, by rms of the difference over that of the whole, and by its largest value."""
    with tempfile.TemporaryDirectory() as folder:
        published: Any = SimpleNamespace(sizes=vars(Sizes()))
        runtime = RuntimeConfig(device="cpu", cache_mib=16)
        model = Token2Wav.load(write_model(Path(folder), published, mean_flow=mean_flow), runtime=runtime)
        voice, tokens = a_voice(_PROMPT), some_tokens(_SPEECH)
        whole = model.mel(tokens, voice, streaming=False)
        starts = range(0, _SPEECH, _HOP)
        windows = [model.mel(tokens[: start + _HOP + _AHEAD], voice, streaming=False) for start in starts]
        cut = [mel[:, 2 * start : 2 * (start + _HOP)] for start, mel in zip(starts, windows, strict=True)]
        ways = {"block mask": model.mel(tokens, voice), "windows": np.concatenate(cut, axis=1)}
    return {
        way: {"rms": float((mel - whole).std() / whole.std()), "largest": float(np.abs(mel - whole).max())}
        for way, mel in ways.items()
    }


def main() -> None:
    result: dict[str, Any] = {"environment": describe()}
    for name, mean_flow in (("turbo", True), ("chatterbox", False)):
        result[name] = measure(mean_flow=mean_flow)
        save("right_context", result)
        print(name, result[name], flush=True)


if __name__ == "__main__":
    main()
