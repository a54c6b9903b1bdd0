"""Error of the windows of CosyVoice1 and GLM-4-Voice: their mel beside that of the whole utterance.

    .venv/bin/python -m lab.cosyvoice1_windows

The models have a quarter of the published width, and random weights. It takes some minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from testkit.models.cosyvoice1_model import spoken, write_glm4_voice_yaml, write_model
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice

_SIZES = {"encoder": 128, "encoder_heads": 4, "encoder_units": 256, "encoder_layers": [4]}
_SIZES |= {"channels": 64, "heads": 4, "dim_head": 16, "layers": [3, 2], "vocoder": [64, 32]}
_UTTERANCES, _PROMPT_TOKENS, _PROMPT_FRAMES = 2, 50, 86
_GLM_BLOCK = 10  # attention block of GLM-4-Voice, in tokens
Mels = list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Measured:
    """Model, and the windows to measure.

    Attributes:
        tokens: tokens of an utterance.
        samples: samples of a token.
        windows: tokens of a window, windows before it, tokens after it, and tokens that fade.
    """

    write: Callable[[Path, Any], Path]
    tokens: int
    samples: int
    windows: list[tuple[int, int, int, int]]


def write_glm4_voice(folder: Path, golden: Any) -> Path:
    def write_file(folder: Path, golden: Any) -> Path:
        path = write_glm4_voice_yaml(folder, golden)
        text = path.read_text().replace("block_size: 2", f"block_size: {_GLM_BLOCK}")
        path.write_text(text)
        return path

    return write_model(folder, golden, write_file)


MODELS = {
    "CosyVoice1": Measured(
        write_model,
        430,
        441,
        [
            (50, 1, 20, 10),
            (50, 2, 10, 10),
            (50, 2, 20, 10),
            (50, 2, 40, 10),
            (50, 4, 20, 10),
            (100, 1, 20, 10),
            (100, 0, 20, 20),
        ],
    ),
    "GLM-4-Voice": Measured(
        write_glm4_voice,
        105,
        1764,
        [(10, 1, 5, 2), (10, 2, 5, 2), (10, 4, 5, 2), (10, 2, 10, 2), (20, 1, 5, 2)],
    ),
}


def mels(folder: Path, count: int, settings: StreamConfig) -> Mels:
    """Computes the mels (bands, frames) of all utterances of some tokens."""
    model = Token2Wav.load(folder, stream=settings, runtime=RuntimeConfig(device="cpu"))
    results = []
    for seed in range(_UTTERANCES):
        random = np.random.default_rng(seed)
        tokens = model.config.tokens.draw(count, random)
        voice = None
        if model.config.takes_voice:
            voice = Voice(
                model.config.tokens.draw(_PROMPT_TOKENS, random),
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


def measure(model: Measured) -> None:
    with tempfile.TemporaryDirectory() as name:
        golden: Any = SimpleNamespace(sizes=_SIZES)
        folder = model.write(Path(name), golden)
        whole = mels(folder, model.tokens, StreamConfig(lookahead_frames=0))
        one_window = mels(folder, model.tokens, StreamConfig(block_tokens=600))
        print(f"positions alone: {error_db(one_window, whole):.1f} dB", flush=True)
        for block, before, after, fading in model.windows:
            settings = StreamConfig(
                block_tokens=block,
                left_blocks=before,
                lookahead_frames=after,
                overlap_tokens=fading,
            )
            own = mels(folder, model.tokens, settings)
            seams = [model.samples * token // 256 for token in range(block, model.tokens, block)]
            print(
                f"{block}, {before * block} before, {after} after: "
                f"{error_db(own, one_window):.1f} dB, with positions {error_db(own, whole):.1f} dB,"
                f" click {click(own, one_window, seams):.2f}",
                flush=True,
            )


def main() -> None:
    for name, model in MODELS.items():
        print(name)
        measure(model)


if __name__ == "__main__":
    main()
