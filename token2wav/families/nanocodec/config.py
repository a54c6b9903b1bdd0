"""Configuration of a NanoCodec, which is read from `model_config.yaml` as data.

The file describes the training too. Only the sample rate, the decoder and the quantiser are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from token2wav.config.strict_yaml import parse_yaml, read_bounded
from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, Length, check_bounds, convert, from_mapping, prefixed
from token2wav.errors import ConfigError
from token2wav.families.nanocodec.archive import CONFIG, WEIGHTS, read_member
from token2wav.published.codec_config import CodecConfig
from token2wav.published.sizes import Kernel, Kernels, Rates, SampleRate, Width

ARCHIVE = "*.nemo"
FILES = (ARCHIVE, CONFIG)
# Names of files with the weights in a folder without an archive, in order of preference.
WEIGHTS_FILES = ("model_weights.safetensors", "model.safetensors", WEIGHTS)

_DECODER, _QUANTIZER = "CausalHiFiGANDecoder", "GroupFiniteScalarQuantizer"

Levels = Annotated[tuple[Annotated[int, Bounds(2, 4096)], ...], Length(16)]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder, a causal HiFi-GAN. Fields have the published names.

    Attributes:
        input_dim: channels of the dequantised codes.
        up_sample_rates: factor of every upsampling.
        base_channels: channels of the first convolution; every upsampling halves them.
        in_kernel_size, out_kernel_size: kernels of the first and of the last convolution.
        resblock_kernel_sizes, resblock_dilation_sizes: kernels of the parallel residual blocks, and
            dilations of the convolutions in each block.
        activation: activation between the layers.
        output_activation: activation that bounds the audio.
        pad_mode: values before the first position of a sequence.
        n_groups_equal_to_out_channels: whether every output channel of an upsampling reads its own
            input channels only.
    """

    input_dim: Width
    up_sample_rates: Rates = (8, 8, 2, 2)
    base_channels: Width = 512
    in_kernel_size: Kernel = 7
    out_kernel_size: Kernel = 3
    resblock_kernel_sizes: Kernels = (3, 7, 11)
    resblock_dilation_sizes: Kernels = (1, 3, 5)
    activation: Literal["half_snake"] = "half_snake"
    output_activation: Literal["tanh", "clamp"] = "tanh"
    pad_mode: Literal["zeros"] = "zeros"
    n_groups_equal_to_out_channels: bool = True

    def __post_init__(self) -> None:
        check_bounds(self, "audio_decoder")
        for name in ("up_sample_rates", "resblock_kernel_sizes", "resblock_dilation_sizes"):
            if not getattr(self, name):
                raise ConfigError(f"audio_decoder.{name}: empty; at least 1 is needed")
        least = 1 << len(self.up_sample_rates)
        if self.base_channels % least:
            raise ConfigError(
                f"audio_decoder.base_channels: {self.base_channels} is not a multiple of {least}, "
                f"which {len(self.up_sample_rates)} stages need, because each halves the channels"
            )

    @property
    def frame_samples(self) -> int:
        return math.prod(self.up_sample_rates)


@dataclass(frozen=True)
class QuantizerConfig:
    """Sizes of the quantiser.

    Attributes:
        num_groups: codes of a frame.
        num_levels_per_group: levels of every value of a group.
    """

    num_groups: Annotated[int, Bounds(1, 64)]
    num_levels_per_group: Levels

    def __post_init__(self) -> None:
        check_bounds(self, "vector_quantizer")
        if not self.num_levels_per_group:
            raise ConfigError("vector_quantizer.num_levels_per_group: empty; at least 1 is needed")
        if self.codebook_size > _MOST_CODES:
            raise ConfigError(
                f"vector_quantizer.num_levels_per_group: {self.codebook_size} codes; at most "
                f"{_MOST_CODES} are allowed"
            )

    @property
    def codebook_size(self) -> int:
        return math.prod(self.num_levels_per_group)


_MOST_CODES = 1 << 20


@dataclass(frozen=True)
class NanoCodecSizes:
    """Sizes of the decoder, and of the quantiser."""

    decoder: DecoderConfig
    quantizer: QuantizerConfig


@dataclass(frozen=True, kw_only=True)
class NanoCodecConfig(CodecConfig):
    """Configuration of a NanoCodec."""

    sizes: NanoCodecSizes


def read(folder: Path) -> NanoCodecConfig:
    """Reads the configuration of a folder with a `.nemo` archive, or with its unpacked files.

    Raises:
        ConfigError: a value is missing, of another type or out of range; or the codec has another
            decoder or quantiser.
        CheckpointError: the archive cannot be read.
    """
    archive = _archive_in(folder)
    path = archive or folder / CONFIG
    content = read_member(archive, CONFIG).getvalue() if archive else read_bounded(path)
    with prefixed(f"{path}: "):
        return _config_from(parse_yaml(content), (archive.name,) if archive else WEIGHTS_FILES)


def _archive_in(folder: Path) -> Path | None:
    """Returns the archive in a folder; None if there is none.

    Raises:
        ConfigError: the folder has several.
    """
    archives = sorted(folder.glob(ARCHIVE))
    if len(archives) > 1:
        names = ", ".join(path.name for path in archives[:4])
        raise ConfigError(f"{folder}: {len(archives)} archives, expected one: {names}")
    return archives[0] if archives else None


def _config_from(document: Any, weights: tuple[str, ...]) -> NanoCodecConfig:
    if not isinstance(document, dict):
        raise ConfigError(f"expected a mapping, got {type(document).__name__}")
    decoder = from_mapping(
        DecoderConfig, _section(document, "audio_decoder", _DECODER), "audio_decoder"
    )
    quantizer = from_mapping(
        QuantizerConfig, _section(document, "vector_quantizer", _QUANTIZER), "vector_quantizer"
    )
    sample_rate = convert(document.get("sample_rate"), SampleRate, "sample_rate")
    values = quantizer.num_groups * len(quantizer.num_levels_per_group)
    if decoder.input_dim != values:
        raise ConfigError(
            f"audio_decoder.input_dim: {decoder.input_dim}, but vector_quantizer gives {values} "
            "values for each frame"
        )
    samples = convert(
        document.get("samples_per_frame", decoder.frame_samples), _Samples, "samples_per_frame"
    )
    if samples != decoder.frame_samples:
        raise ConfigError(
            f"samples_per_frame: {samples}, but audio_decoder.up_sample_rates give "
            f"{decoder.frame_samples}"
        )
    return NanoCodecConfig(
        tokens=TokenFormat.codes(quantizer.num_groups, quantizer.codebook_size),
        sample_rate=sample_rate,
        samples_per_token=samples,
        sizes=NanoCodecSizes(decoder, quantizer),
        weights=weights,
    )


_Samples = Annotated[int, Bounds(1, 1 << 20)]


def _section(document: dict[Any, Any], name: str, kind: str) -> dict[Any, Any]:
    """Returns a section without its class name.

    Raises:
        ConfigError: the section is missing, or belongs to another class than `kind`.
    """
    section = document.get(name)
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: expected a mapping, got {type(section).__name__}")
    target = section.get("_target_")
    if not isinstance(target, str) or target.rpartition(".")[2] != kind:
        raise ConfigError(f"{name}._target_: {target!r:.80} is not supported; expected {kind}")
    return {key: value for key, value in section.items() if key != "_target_"}
