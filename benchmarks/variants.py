"""Cost of a model's variants: fewer ODE steps, no guidance, another vocoder and several codebooks are measured.

Every variant speaks the same seconds of audio in one stream on one thread. What counts is time on the CPU, which other
work on the machine does not change as it changes time on the clock. Rounds go through all variants; the least of each
stage is kept. Prints a table; writes JSON.

    .venv/bin/python -m benchmarks.variants
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.chunk_batch import clocked
from benchmarks.environment import describe, save
from benchmarks.models import BIGVGAN, SIZES, a_voice, bigvgan_model, codebook_model, random_model
from token2wav import StreamConfig, Token2Wav
from token2wav.families.cosyvoice3.config import read_cosyvoice3

PROMPT_SECONDS = 3


def without_guidance(folder: Path, sizes: dict[str, int]) -> Path:
    """Makes a model folder as if trained or distilled without guidance."""
    random_model(folder, sizes)
    path = folder / "cosyvoice3.yaml"
    path.write_text(re.sub("inference_cfg_rate: .*", "inference_cfg_rate: 0", path.read_text()))
    return folder


def variants(parent: Path, size: str) -> dict[str, tuple[Path, int]]:
    """Writes the variants of a model below `parent`; returns their folders and ODE steps by name."""
    sizes = dict(SIZES[size])
    usual = random_model(parent / "usual", sizes)
    bare = without_guidance(parent / "bare", sizes)
    vocoder = dataclasses.replace(BIGVGAN, upsample_initial_channel=sizes["base_channels"] * 2)
    return {
        **{f"{steps} steps": (usual, steps) for steps in (10, 5, 3, 2)},
        **{f"{steps} steps, no guidance": (bare, steps) for steps in (10, 5, 3, 2)},
        "10 steps, BigVGAN": (bigvgan_model(parent / "bigvgan", sizes, vocoder), 10),
        "10 steps, 8 codebooks": (codebook_model(parent / "codebooks", sizes), 10),
    }


def loaded(folder: Path, steps: int) -> Token2Wav:
    """Loads a variant with hops up to four seconds, or as near to that as attention blocks are."""
    config = read_cosyvoice3(folder)
    longest = config.block_tokens * round(4 / config.block_seconds)
    return Token2Wav.load(folder, stream=StreamConfig(max_hop_tokens=longest, steps=(steps,)))


def cost(model: Token2Wav, seconds: int) -> tuple[float, float]:
    """Measures CPU-seconds of flow and vocoder for each second of audio."""
    config, rate = model.config, model.config.token_frame_rate
    shape = (round(seconds * rate), *config.token_shape)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape)
    with clocked(model.pipeline, time.process_time) as clocks:
        audio = model.synthesize(tokens, a_voice(config, prompt_tokens=round(PROMPT_SECONDS * rate)))
    flow, vocoder = (sum(clock.seconds) * model.config.sample_rate / len(audio) for clock in clocks)
    return flow, vocoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--seconds", type=int, default=10, help="of audio")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        models = {name: loaded(*each) for name, each in variants(Path(temporary), options.model).items()}
        # The first round warms up, and computes the prompt.
        rounds = [[cost(model, options.seconds) for model in models.values()] for _ in range(options.rounds + 1)][1:]
    for (name, model), own in zip(models.items(), zip(*rounds, strict=True), strict=True):
        flow, vocoder = (round(min(stage), 4) for stage in zip(*own, strict=True))
        page_mib = model.pipeline.flow.usage().page_bytes / 2**20
        rows.append({"variant": name, "flow_cpu_s_per_audio_s": flow, "vocoder_cpu_s_per_audio_s": vocoder})
        rows[-1]["cache_mib_per_audio_s"] = round(page_mib / model.config.block_seconds, 2)
        print(rows[-1], flush=True)
    facts = {"model": options.model, "audio_seconds": options.seconds, "rounds": options.rounds}
    save("variants", {"environment": describe(), **facts, "rows": rows})


if __name__ == "__main__":
    main()
