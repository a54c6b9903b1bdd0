"""Configuration of Mimi, which is read from `config.json` of a `transformers` folder, or from a
folder of `moshi`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, from_mapping, prefixed
from token2wav.errors import ConfigError
from token2wav.families.mimi.moshi_config import (
    WEIGHTS_PATTERN,
    moshi_weights_file,
    read_moshi_sizes,
)
from token2wav.published.checkpoint_files import PUBLISHED
from token2wav.published.codec_config import CodecConfig, read_seanet_sizes
from token2wav.published.codec_sizes import SeanetSizes
from token2wav.published.sizes import (
    CodebookCount,
    CodebookSize,
    Width,
)

MODEL_TYPES = ("mimi",)
FILES = (WEIGHTS_PATTERN,)


@dataclass(frozen=True)
class MimiSizes(SeanetSizes):
    """Sizes of Mimi's decoder.

    Attributes:
        frame_rate: frames of codes per second; None for half of the rate of the transformer.
        codebook_size, codebook_dim: entries of a codebook, and their length.
        num_quantizers, num_semantic_quantizers: codebooks, and semantic codebooks.
        vector_quantization_hidden_dimension: length of the sum of entries.
    """

    frame_rate: Annotated[float | None, Bounds(0.01, 1000)] = None
    codebook_size: CodebookSize = 2048
    codebook_dim: Width = 256
    num_quantizers: CodebookCount = 32
    vector_quantization_hidden_dimension: Width = 256
    num_semantic_quantizers: CodebookCount = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_semantic_quantizers >= self.num_quantizers:
            raise ConfigError(
                f"num_semantic_quantizers: {self.num_semantic_quantizers} is not below "
                f"num_quantizers, {self.num_quantizers}"
            )
        rate = self.sampling_rate / self.frame_samples
        if self.frame_rate is not None and abs(self.frame_rate - rate) > 1e-6 * rate:
            raise ConfigError(
                f"frame_rate: {self.frame_rate:g}, but sampling_rate and upsampling_ratios give "
                f"{rate:g}"
            )

    @property
    def stride(self) -> int:
        inner_rate = math.ceil(self.sampling_rate / math.prod(self.upsampling_ratios))
        return 2 if self.frame_rate is None else max(1, int(inner_rate / self.frame_rate))


@dataclass(frozen=True, kw_only=True)
class MimiConfig(CodecConfig):
    """Configuration of a Mimi model."""

    sizes: MimiSizes


def read(folder: Path) -> MimiConfig:
    """Reads the configuration of a folder. Settings of the encoder and of the training are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or of an unsupported variant.
    """
    if (weights := moshi_weights_file(folder)) is not None:
        with prefixed(f"{weights}: "):
            sizes = from_mapping(MimiSizes, read_moshi_sizes(folder), "")
            return config_of(sizes, (weights.name,))
    return config_of(read_seanet_sizes(folder, MimiSizes))


def config_of(sizes: MimiSizes, weights: tuple[str, ...] = PUBLISHED) -> MimiConfig:
    """Returns the configuration of a model with these sizes and names of weights."""
    samples = sizes.frame_samples
    return MimiConfig(
        tokens=TokenFormat.codes(sizes.num_quantizers, sizes.codebook_size, fewer=True),
        sample_rate=sizes.sampling_rate,
        samples_per_token=samples,
        sizes=sizes,
        weights=weights,
    )
