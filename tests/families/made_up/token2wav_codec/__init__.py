"""Codec, a made-up family with one stage: frames of two codes become audio, without a prompt, mel
or noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from token2wav.config.token_format import TokenFormat
from token2wav.published.codec_config import CodecConfig

FILES = ("codec.json",)


@dataclass(frozen=True, kw_only=True)
class MadeUpConfig(CodecConfig):
    """Configuration of a made-up codec.

    Attributes:
        sizes: channels of the decoder.
    """

    sizes: int
    weights: tuple[str, ...] = ("decoder.safetensors", "decoder.pt")


def read(folder: Path) -> MadeUpConfig:
    return MadeUpConfig(
        tokens=TokenFormat.codes(2, 16),
        block_tokens=5,
        sample_rate=2000,
        samples_per_token=80,
        hop_blocks=(1, 4),
        sizes=6,
    )
