"""Cost of a model's variants: fewer ODE steps, no guidance, another vocoder and several codebooks are measured.

Every variant speaks the same seconds of audio in one stream on one thread. What counts is time on the CPU, which other
work on the machine does not change as it changes time on the clock. Rounds go through all variants; the least of each
stage is kept. Prints a table; writes JSON and a plot.

    .venv/bin/python -m benchmarks.variants
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch

from benchmarks.environment import RESULTS, describe, save
from benchmarks.models import BIGVGAN, SIZES, bigvgan_model, codebook_model, random_model
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav.families.cosyvoice3.config import CosyVoice3Config

mpl.use("Agg")
from matplotlib import pyplot as plt

PROMPT_SECONDS = 3


@dataclass(frozen=True)
class Variant:
    """Variant of a model: its folder, and what is asked of it."""

    name: str
    folder: Path
    steps: int = 10


class CpuClock:
    """CPU clock before an engine, which adds up the time on the CPU that `advance` takes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.seconds = 0.0

    def advance(self, batch: Any) -> Any:
        start = time.process_time()
        result = self._engine.advance(batch)
        self.seconds += time.process_time() - start
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def without_guidance(folder: Path, sizes: dict[str, int]) -> Path:
    """Makes a model folder as if trained or distilled without guidance."""
    random_model(folder, sizes)
    path = folder / "cosyvoice3.yaml"
    path.write_text(re.sub("inference_cfg_rate: .*", "inference_cfg_rate: 0", path.read_text()))
    return folder


def variants(parent: Path, size: str) -> list[Variant]:
    """Writes the variants of a model below `parent`."""
    sizes = dict(SIZES[size])
    usual = random_model(parent / "usual", sizes)
    bare = without_guidance(parent / "bare", sizes)
    vocoder = dataclasses.replace(BIGVGAN, upsample_initial_channel=sizes["base_channels"] * 2)
    return [
        *(Variant(f"{steps} steps", usual, steps) for steps in (10, 5, 3, 2)),
        *(Variant(f"{steps} steps, no guidance", bare, steps) for steps in (10, 5, 3, 2)),
        Variant("10 steps, BigVGAN", bigvgan_model(parent / "bigvgan", sizes, vocoder)),
        Variant("10 steps, 8 codebooks", codebook_model(parent / "codebooks", sizes)),
    ]


def _stream(variant: Variant) -> StreamConfig:
    """Returns settings with hops up to four seconds, or as near to that as attention blocks are."""
    config = CosyVoice3Config.read(variant.folder)
    return StreamConfig(
        steps=(variant.steps,),
        max_hop_tokens=config.block_tokens * round(4 / config.block_seconds),
    )


def a_voice(model: Token2Wav) -> Voice:
    flow, rng = model.config, np.random.default_rng(1)
    tokens = round(PROMPT_SECONDS * model.config.token_frame_rate)
    mel = rng.standard_normal((flow.token_mel_ratio * tokens, flow.mel_bands))
    return Voice(
        rng.integers(0, flow.vocab_size, (tokens, *flow.token_shape)), mel, rng.standard_normal(flow.speaker_size)
    )


def cost(model: Token2Wav, voice: Voice, seconds: int) -> dict[str, float]:
    """Measures CPU-seconds of both stages for each second of audio."""
    pipeline, count = model.pipeline, round(seconds * model.config.token_frame_rate)
    shape = (count, *model.config.token_shape)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, shape)
    flow, vocoder = pipeline.flow, pipeline.vocoder
    clocks = CpuClock(flow), CpuClock(vocoder)
    pipeline.flow, pipeline.vocoder = clocks  # type: ignore[assignment]
    try:
        audio_s = len(model.synthesize(tokens, voice)) / model.config.sample_rate
    finally:
        pipeline.flow, pipeline.vocoder = flow, vocoder
    return {"flow": clocks[0].seconds / audio_s, "vocoder": clocks[1].seconds / audio_s}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 0.45 * len(rows) + 1), layout="constrained")
    names = [row["variant"] for row in rows][::-1]
    flow, vocoder = ([row[f"{stage}_cpu_s_per_audio_s"] for row in rows][::-1] for stage in ("flow", "vocoder"))
    axis.barh(names, flow, label="flow")
    axis.barh(names, vocoder, left=flow, label="vocoder")
    axis.set_xlabel("CPU-seconds per second of audio")
    axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--seconds", type=int, default=10, help="of audio")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        chosen = variants(Path(temporary), options.model)
        models = [Token2Wav.load(each.folder, stream=_stream(each)) for each in chosen]
        voices = [a_voice(model) for model in models]
        costs: list[list[dict[str, float]]] = [[] for _ in chosen]
        for round_ in range(options.rounds + 1):
            for own, model, voice in zip(costs, models, voices, strict=True):
                found = cost(model, voice, options.seconds)
                if round_:  # the first one warms up, and computes the prompt
                    own.append(found)
    rows = []
    for each, model, own in zip(chosen, models, costs, strict=True):
        least = {stage: min(one[stage] for one in own) for stage in ("flow", "vocoder")}
        page = model.pipeline.flow.usage().page_bytes
        row = {
            "variant": each.name,
            **{f"{stage}_cpu_s_per_audio_s": round(value, 4) for stage, value in least.items()},
            "cache_mib_per_audio_s": round(page / model.config.block_seconds / 2**20, 2),
        }
        rows.append(row)
        print(row, flush=True)
    result = {"model": options.model, "audio_seconds": options.seconds, "rounds": options.rounds, "rows": rows}
    save("variants", {"environment": describe(), **result})
    plot(rows, RESULTS / "variants.png")


if __name__ == "__main__":
    main()
