"""Fixtures that the client's tests share: a well-formed voice, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest


@pytest.fixture
def voice_arrays() -> dict[str, npt.NDArray[Any]]:
    """The three fields of a voice with a prompt of 4 tokens."""
    random = np.random.default_rng(0)
    return {
        "prompt_tokens": np.array([5, 6, 7, 8]),
        "prompt_mel": random.standard_normal((8, 80)).astype(np.float32),
        "speaker_embedding": random.standard_normal(192).astype(np.float32),
    }


@pytest.fixture
def voice_file(tmp_path: Path, voice_arrays: dict[str, npt.NDArray[Any]]) -> Path:
    path = tmp_path / "voice.npz"
    np.savez(path, **voice_arrays)  # type: ignore[arg-type]
    return path
