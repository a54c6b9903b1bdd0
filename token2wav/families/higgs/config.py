"""Configuration of the Higgs Audio tokenizer v2, which is read from the `config.json` of a
`transformers` folder, or of the first release.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import (
    Bounds,
    Length,
    check_bounds,
    convert,
    from_mapping,
    known_fields,
    prefixed,
)
from token2wav.errors import ConfigError
from token2wav.families.higgs.first_release import CONFIG_KEYS, WEIGHTS, read_arguments
from token2wav.published.codec_config import SymmetricCodecConfig
from token2wav.published.codec_sizes import SymmetricSizes
from token2wav.published.sizes import CodebookCount, CodebookSize, SampleRate, TokenRate, Width
from token2wav.published.transformers_json import CONFIG_JSON, has_model_type, read_json

__all__ = ["CONFIG_KEYS", "FILES", "MODEL_TYPES", "HiggsConfig", "HiggsSizes", "read"]

MODEL_TYPES = ("higgs_audio_v2_tokenizer",)
FILES: tuple[str, ...] = ()

_WEIGHTS = ("model.safetensors",)
_ACOUSTIC, _SEMANTIC = "acoustic_model_config", "semantic_model_config"
# Sizes of the decoder that a folder may leave out, as `transformers` publishes them.
_DECODER = {
    "downsampling_ratios": [8, 5, 4, 2],
    "upsampling_ratios": [8, 5, 4, 2],
    "decoder_hidden_size": 1024,
    "hidden_size": 256,
}
_SEMANTIC_WIDTH = 768  # channels of HuBERT, if the folder does not name them

# Frames of 40 ms that are held back by default. The decoder reads 394 ms ahead. The last frame of a
# chunk has an SNR of 52 dB (docs/models.md).
_LOOKAHEAD_FRAMES = 7

Bandwidths = Annotated[tuple[Annotated[float, Bounds(0.001, 1000)], ...], Length(16)]


@dataclass(frozen=True)
class PublishedSizes:
    """Sizes of the codebooks in a `transformers` folder. Fields have the published names.

    Attributes:
        sample_rate: samples per second.
        target_bandwidths: kilobits per second; the last value gives the number of codebooks.
        codebook_size, codebook_dim: entries of a codebook, and their length.
    """

    sample_rate: SampleRate = 24000
    target_bandwidths: Bandwidths = (0.5, 1, 1.5, 2)
    codebook_size: CodebookSize = 1024
    codebook_dim: Width = 64

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if not self.target_bandwidths:
            raise ConfigError("target_bandwidths: empty; at least 1 is needed")
        if self.codebook_size < 2:
            raise ConfigError("codebook_size: 1 is below 2")

    def codebooks(self, frame_samples: int) -> int:
        """Returns the number of codebooks.

        Raises:
            ConfigError: the bandwidth is too small for one codebook, or asks for too many, or the
                number of frames per second is out of range.
        """
        bits = math.ceil(math.log2(self.codebook_size))
        rate = math.ceil(_frame_rate(self.sample_rate, frame_samples))
        count = int(1000 * self.target_bandwidths[-1] // (rate * bits))
        with prefixed("target_bandwidths: "):
            return int(convert(count, CodebookCount, "number of codebooks"))


@dataclass(frozen=True, kw_only=True)
class HiggsSizes:
    """Sizes of a Higgs Audio tokenizer.

    Attributes:
        sample_rate: samples per second.
        codebook_size, codebook_dim: entries of a codebook, and their length.
        quantizer_width: channels of the sum of the codebooks.
    """

    sample_rate: int
    codebooks: int
    codebook_size: int
    codebook_dim: int
    quantizer_width: int
    decoder: SymmetricSizes


@dataclass(frozen=True, kw_only=True)
class HiggsConfig(SymmetricCodecConfig):
    """Configuration of a Higgs Audio tokenizer."""

    sizes: HiggsSizes


def read(folder: Path) -> HiggsConfig:
    """Reads the configuration of a folder. Settings of the encoders are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or does not fit another one.
    """
    path = folder / CONFIG_JSON
    document = read_json(path)
    published = has_model_type(folder, *MODEL_TYPES)
    with prefixed(f"{path}: "):
        sizes = _transformers_sizes(document) if published else _first_sizes(document)
        samples = sizes.decoder.frame_samples
        _frame_rate(sizes.sample_rate, samples)  # checks its range
    return HiggsConfig(
        tokens=TokenFormat.codes(sizes.codebooks, sizes.codebook_size, fewer=True),
        sample_rate=sizes.sample_rate,
        samples_per_token=samples,
        withheld_frames_default=_LOOKAHEAD_FRAMES,
        sizes=sizes,
        weights=_WEIGHTS if published else WEIGHTS,
    )


def _transformers_sizes(document: dict[str, Any]) -> HiggsSizes:
    sizes = from_mapping(PublishedSizes, known_fields(PublishedSizes, document), "")
    acoustic = _DECODER | _section(document, _ACOUSTIC)
    with prefixed(f"{_ACOUSTIC}."):
        decoder = from_mapping(SymmetricSizes, known_fields(SymmetricSizes, acoustic), "")
    semantic = _section(document, _SEMANTIC).get("hidden_size", _SEMANTIC_WIDTH)
    return HiggsSizes(
        sample_rate=sizes.sample_rate,
        codebooks=sizes.codebooks(decoder.frame_samples),
        codebook_size=sizes.codebook_size,
        codebook_dim=sizes.codebook_dim,
        quantizer_width=decoder.latents + int(convert(semantic, Width, f"{_SEMANTIC}.hidden_size")),
        decoder=decoder,
    )


def _first_sizes(document: dict[str, Any]) -> HiggsSizes:
    arguments = read_arguments(document)
    return HiggsSizes(
        sample_rate=arguments.sample_rate,
        codebooks=arguments.n_q,
        codebook_size=arguments.bins,
        codebook_dim=arguments.codebook_dim,
        quantizer_width=arguments.quantizer_width,
        decoder=arguments.decoder,
    )


def _frame_rate(sample_rate: int, frame_samples: int) -> float:
    return float(convert(sample_rate / frame_samples, TokenRate, "frames per second"))


def _section(document: dict[str, Any], name: str) -> dict[str, Any]:
    section = document.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: expected an object, got {type(section).__name__}")
    return section
