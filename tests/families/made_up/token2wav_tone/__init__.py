"""Tone, a made-up family of another distribution: tokens are pitches.

The model file sets the loudness.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from token2wav.config.model_config import ModelConfig, StageName
from token2wav.config.token_format import TokenFormat

FILES = ("tone.json",)


@dataclass(frozen=True, kw_only=True)
class ToneConfig(ModelConfig):
    """Configuration of a tone: one number, which is read from the model file."""

    token_mel_ratio: int = 2
    mel_bands: int = 1
    speaker_size: int = 3
    takes_prompt: bool = True

    def weights_names(self, stage: StageName) -> tuple[str, ...]:
        return FILES


def read(folder: Path) -> ToneConfig:
    return ToneConfig(
        tokens=TokenFormat.numbers(100),
        block_tokens=5,
        lookahead_tokens=1,
        sample_rate=2000,
        samples_per_token=80,
        stages=("flow", "vocoder"),
    )
