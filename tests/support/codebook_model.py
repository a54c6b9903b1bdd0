"""A model whose tokens have four codes each, small and fast, at 12.5 tokens a second and four mel frames a token."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.models import SIZES, codebook_model
from tests.support.golden import TINY
from token2wav import Voice

CODEBOOKS, VOCABULARY, RATIO = 4, 50, 4
SAMPLES_PER_TOKEN = RATIO * 480


def write_model(folder: Path, merge: str = "sum") -> Path:
    """Writes it and returns its folder; the vocoder is that of the golden data, so that something is heard."""
    codebook_model(folder, SIZES["tiny"], CODEBOOKS, VOCABULARY, merge)
    shutil.copy(TINY / "hift.safetensors", folder)
    return folder


def some_codes(count: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, CODEBOOKS)).astype(np.int32)


def a_voice(prompt_tokens: int = 20) -> Voice:
    random = np.random.default_rng(1)
    mel = random.standard_normal((RATIO * prompt_tokens, 80)).astype(np.float32)
    return Voice(some_codes(prompt_tokens, 2), mel, random.standard_normal(192).astype(np.float32))
