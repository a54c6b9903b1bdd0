"""Codec, a made-up family with one stage: frames of two codes become audio, without a prompt, mel
or noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from token2wav.model_config import ModelConfig

FILES = ("codec.json",)


@dataclass(frozen=True, kw_only=True)
class CodecConfig(ModelConfig):
    """Configuration of a codec."""


def read(folder: Path) -> CodecConfig:
    return CodecConfig(
        vocab_size=16,
        token_frame_rate=25,
        token_shape=(2,),
        block_tokens=5,
        token_mel_ratio=1,
        mel_bands=2,
        speaker_size=0,
        sample_rate=2000,
        stages=("decoder",),
        samples_per_token=80,
        takes_prompt=False,
    )
