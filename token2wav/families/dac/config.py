"""Configuration of DAC, which is read from `config.json` of a `transformers` folder, or from the
`weights.pth` of the package `descript-audio-codec`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import convert, from_mapping, known_fields, prefixed
from token2wav.families.dac.descript import WEIGHTS_PATTERNS, descript_weights_file, read_descript
from token2wav.published.codec_config import SymmetricCodecConfig
from token2wav.published.codec_sizes import SymmetricSizes
from token2wav.published.sizes import (
    CodebookCount,
    CodebookSize,
    SampleRate,
    TokenRate,
    Width,
)
from token2wav.published.transformers_json import CONFIG_JSON, has_model_type, read_json

MODEL_TYPES = ("dac",)
FILES = WEIGHTS_PATTERNS

# A chunk of one token (12 ms at 44.1 kHz) would be too short to play, and would cost a step. So a
# block has the tokens of at least 40 ms: 4 tokens (46 ms) at 44.1 kHz, 3 at 24 kHz, 2 at 16 kHz.
_BLOCK_SECONDS = 0.04

# Frames that other DAC models hold back. The last frame of a chunk then has an SNR of 52 dB or more
# (docs/models.md).
_LOOKAHEAD_FRAMES = 8


@dataclass(frozen=True, kw_only=True)
class DacSizes(SymmetricSizes):
    """Sizes of DAC.

    Attributes:
        sampling_rate: samples per second.
        n_codebooks, codebook_size, codebook_dim: codebooks, their entries, and the length of an
            entry.
    """

    sampling_rate: SampleRate = 16000
    n_codebooks: CodebookCount = 9
    codebook_size: CodebookSize = 1024
    codebook_dim: Width = 8


@dataclass(frozen=True, kw_only=True)
class DacConfig(SymmetricCodecConfig):
    """Configuration of a DAC model."""

    sizes: DacSizes


def read(folder: Path) -> DacConfig:
    """Reads the configuration of a folder. Settings of the training are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or does not fit another one.
        CheckpointError: the folder has no weights, or `weights.pth` cannot be read.
    """
    if not has_model_type(folder, *MODEL_TYPES):
        path = descript_weights_file(folder)
        return replace(config_of(read_descript(path), path), weights=(path.name,))
    path = folder / CONFIG_JSON
    document = read_json(path)
    with prefixed(f"{path}: "):
        return config_of(known_fields(DacSizes, document), path)


def config_of(values: dict[str, Any], path: Path) -> DacConfig:
    """Returns the configuration of a model.

    Args:
        values: values of `DacSizes`.
        path: file of the values, for messages.

    Raises:
        ConfigError: a value is of another type, out of range, or does not fit another one.
    """
    with prefixed(f"{path}: "):
        sizes = from_mapping(DacSizes, values, "")
        samples = sizes.frame_samples
        rate = convert(sizes.sampling_rate / samples, TokenRate, "frames per second")
    return DacConfig(
        tokens=TokenFormat.codes(sizes.n_codebooks, sizes.codebook_size, fewer=True),
        block_tokens=math.ceil(_BLOCK_SECONDS * rate),
        sample_rate=sizes.sampling_rate,
        samples_per_token=samples,
        withheld_frames_default=_LOOKAHEAD_FRAMES,
        sizes=sizes,
    )
