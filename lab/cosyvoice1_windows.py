"""Error of the windows of CosyVoice1: their mel beside that of the whole utterance.

    .venv/bin/python -m lab.cosyvoice1_windows

The model has a quarter of the published width, and random weights. It takes some minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from testkit.models.cosyvoice1_model import spoken, write_model
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice

_SIZES = {"encoder": 128, "encoder_heads": 4, "encoder_units": 256, "encoder_layers": [4]}
_SIZES |= {"channels": 64, "heads": 4, "dim_head": 16, "layers": [3, 2], "vocoder": [64, 32]}
_TOKENS, _PROMPT_TOKENS, _PROMPT_FRAMES, _UTTERANCES = 430, 50, 86, 2
_VOCABULARY = 4096
# tokens of a window, windows before it, tokens after it, and tokens that fade
_WINDOWS = [
    (50, 1, 20, 10),
    (50, 2, 10, 10),
    (50, 2, 20, 10),
    (50, 2, 40, 10),
    (50, 4, 20, 10),
    (100, 1, 20, 10),
    (100, 0, 20, 20),
]
Mels = list[np.ndarray[Any, Any]]


def mels(folder: Path, settings: StreamConfig) -> Mels:
    """Computes the mels (bands, frames) of all utterances."""
    model = Token2Wav.load(folder, stream=settings, runtime=RuntimeConfig(device="cpu"))
    results = []
    for seed in range(_UTTERANCES):
        random = np.random.default_rng(seed)
        tokens = random.integers(0, _VOCABULARY, _TOKENS)
        voice = Voice(
            random.integers(0, _VOCABULARY, _PROMPT_TOKENS),
            random.standard_normal((_PROMPT_FRAMES, 80)),
            random.standard_normal(192),
        )
        results.append(spoken(model, tokens, voice)[1].numpy())
    return results


def error_db(own: Mels, reference: Mels) -> float:
    pairs = list(zip(own, reference, strict=True))
    return float(np.mean([10 * np.log10((a - b).var() / b.var()) for a, b in pairs]))


def click(own: Mels, reference: Mels, frames: list[int]) -> float:
    """Median over the seams of an utterance of the largest jump of the error near a seam, as a mean
    over utterances.
    """
    jumps = [
        np.abs(np.diff(a - b, axis=1)).mean(axis=0) / b.std()
        for a, b in zip(own, reference, strict=True)
    ]
    near = [[jump[frame - 2 : frame + 20].max() for frame in frames] for jump in jumps]
    return float(np.median(near, axis=1).mean())


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        golden: Any = SimpleNamespace(sizes=_SIZES)
        folder = write_model(Path(name), golden)
        whole = mels(folder, StreamConfig(lookahead_frames=0))
        one_window = mels(folder, StreamConfig(block_tokens=600))
        print(f"positions alone: {error_db(one_window, whole):.1f} dB", flush=True)
        for block, before, after, fading in _WINDOWS:
            own = mels(
                folder,
                StreamConfig(
                    block_tokens=block,
                    left_blocks=before,
                    lookahead_frames=after,
                    overlap_tokens=fading,
                ),
            )
            seams = [441 * token // 256 for token in range(block, _TOKENS, block)]
            print(
                f"{block}, {before * block} before, {after} after: "
                f"{error_db(own, one_window):.1f} dB, with positions {error_db(own, whole):.1f} dB,"
                f" click {click(own, one_window, seams):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
