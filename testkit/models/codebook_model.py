"""Small and fast model of tokens with four codes each.

It has 12.5 tokens a second and four mel frames a token.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from testkit.models.golden import TINY
from testkit.models.sized import SIZES, fill_randomly, resized_yaml

CODEBOOKS, VOCABULARY, RATIO = 4, 50, 4


def write_model(folder: Path, merge: str = "sum") -> Path:
    """Writes the model and returns its folder.

    The vocoder is taken from the golden data, so that the audio is not silent.
    """
    text = resized_yaml(SIZES["tiny"])
    for key, value in (
        ("token_frame_rate", "12.5"),
        ("token_mel_ratio", str(RATIO)),
        ("chunk_size", "12"),
    ):
        text = re.sub(rf"(?m)^{key}: .*", f"{key}: {value}", text)
    codebooks = f"    codebooks:\n        count: {CODEBOOKS}\n        merge: {merge}\n"
    text = text.replace("    vocab_size: 6561\n", f"    vocab_size: {VOCABULARY}\n{codebooks}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cosyvoice3.yaml").write_text(text)
    fill_randomly(folder)
    shutil.copy(TINY / "hift.safetensors", folder)
    return folder


def some_codes(count: int) -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, VOCABULARY, (count, CODEBOOKS)).astype(np.int32)
