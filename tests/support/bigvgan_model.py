"""A model whose vocoder is a BigVGAN, small and fast, with rates that are not CosyVoice3's: 16 kHz, 33 1/3 tokens/s."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.models import SIZES, bigvgan_model
from tests.families.bigvgan.rig import changed, random_bigvgan
from token2wav import Voice

BANDS, RATIO = 20, 3
VOCODER = changed(
    upsample_rates=(16, 10),
    upsample_kernel_sizes=(32, 20),
    resblock_kernel_sizes=(3,),
    resblock_dilation_sizes=((2,),),
    num_mels=BANDS,
    hop_size=160,
    sampling_rate=16_000,
)
SAMPLE_RATE = 16_000
SAMPLES_PER_TOKEN = RATIO * 160


def write_model(folder: Path) -> Path:
    """Writes it and returns its folder; the audio is neither silent nor at its limits."""
    bigvgan_model(folder, SIZES["tiny"], VOCODER, RATIO)
    save_file(random_bigvgan(VOCODER).state_dict(), folder / "bigvgan" / "generator.safetensors")
    return folder


def a_voice(prompt_tokens: int = 30) -> Voice:
    random = np.random.default_rng(1)
    mel = torch.randn(RATIO * prompt_tokens, BANDS, generator=torch.Generator().manual_seed(1))
    return Voice(random.integers(0, 6561, prompt_tokens), mel, random.standard_normal(192))
