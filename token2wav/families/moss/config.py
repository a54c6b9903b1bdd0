"""Configuration of the MOSS Audio Tokenizer, which is read from `config.json` of its folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import (
    Bounds,
    check_bounds,
    convert,
    from_mapping,
    known_fields,
    prefixed,
)
from token2wav.errors import ConfigError
from token2wav.published.codec_config import CodecConfig
from token2wav.published.sizes import (
    CodebookCount,
    CodebookSize,
    Heads,
    Layers,
    Rate,
    SampleRate,
    TokenRate,
    Width,
)
from token2wav.published.transformers_json import CONFIG_JSON, read_json

MODEL_TYPES = ("moss-audio-tokenizer",)
FILES: tuple[str, ...] = ()

_MOST_PARTS = 64
_TRANSFORMER, _PATCHES = "Transformer", "PatchedPretransform"
_CODES, _PARTS = "quantizer_kwargs", "decoder_kwargs"
Seconds = Annotated[float, Bounds(0.001, 10_000)]
Channels = Annotated[int, Bounds(1, 2)]


@dataclass(frozen=True, kw_only=True)
class QuantizerSizes:
    """Sizes of the codebooks. Fields and defaults are the published ones. All kinds of codebooks
    (`quantizer_type`) have the same decoder.

    Attributes:
        num_quantizers, codebook_size, codebook_dim: codebooks, their entries, and the length of an
            entry.
        rvq_dim: channels of the sum of the codebooks; None for `input_dim`.
        output_dim: channels of the latents; None for `input_dim`.
        input_dim: channels of the encoder's output.
    """

    input_dim: Width = 768
    rvq_dim: Annotated[int | None, Bounds(1, 1 << 16)] = 512
    output_dim: Annotated[int | None, Bounds(1, 1 << 16)] = 768
    num_quantizers: CodebookCount = 32
    codebook_size: CodebookSize = 1024
    codebook_dim: Width = 8

    def __post_init__(self) -> None:
        check_bounds(self, _CODES)

    @property
    def width(self) -> int:
        """Channels of the sum of the codebooks."""
        return self.rvq_dim or self.input_dim

    @property
    def latents(self) -> int:
        """Channels of the latents."""
        return self.output_dim or self.input_dim


@dataclass(frozen=True, kw_only=True)
class TransformerPart:
    """Part of the decoder that is a transformer. Fields have the published names.

    Attributes:
        input_dimension, output_dimension: channels before and after the part.
        d_model, dim_feedforward: channels inside.
        max_period: base of rotary positions.
        context_duration: seconds that a position attends to; None for the value of the model.
        layer_scale: first value of the scales in the training; None for no scales.
        causal, norm, positional_embedding, gating: variants, of which only the published one is
            supported.
    """

    input_dimension: Width
    output_dimension: Width
    d_model: Width
    dim_feedforward: Width
    num_heads: Heads
    num_layers: Layers
    max_period: Annotated[float, Bounds(1, 1e9)] = 10_000.0
    context_duration: Annotated[float | None, Bounds(0.001, 10_000)] = None
    layer_scale: Annotated[float, Bounds(-1e9, 1e9)]
    causal: bool = True
    norm: Literal["layer_norm"] = "layer_norm"
    positional_embedding: Literal["rope"] = "rope"
    gating: Literal["none"] = "none"

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if not self.causal:
            raise ConfigError("causal: False is not supported; expected True")
        if self.d_model % (2 * self.num_heads):
            raise ConfigError(
                f"d_model: {self.d_model} is no multiple of {2 * self.num_heads}, twice num_heads; "
                "rotary positions need pairs"
            )


@dataclass(frozen=True, kw_only=True)
class PatchPart:
    """Part of the decoder that turns channels into `patch_size` times as many positions."""

    patch_size: Rate

    def __post_init__(self) -> None:
        check_bounds(self, "")


Part = TransformerPart | PatchPart


def _published_parts() -> tuple[Part, ...]:
    def transformer(inputs: int, outputs: int, width: int, layers: int, heads: int) -> Part:
        return TransformerPart(
            input_dimension=inputs,
            output_dimension=outputs,
            d_model=width,
            dim_feedforward=4 * width,
            num_heads=heads,
            num_layers=layers,
            layer_scale=0.01,
        )

    return (
        transformer(768, 1280, 1280, 32, 20),
        PatchPart(patch_size=2),
        transformer(640, 768, 768, 12, 12),
        PatchPart(patch_size=2),
        transformer(384, 768, 768, 12, 12),
        PatchPart(patch_size=2),
        transformer(384, 240, 768, 12, 12),
        PatchPart(patch_size=240),
    )


@dataclass(frozen=True, kw_only=True)
class MossSizes:
    """Sizes of the decoder.

    Attributes:
        sampling_rate: samples per second.
        downsample_rate: samples of each channel for a frame of codes.
        channels: channels of the audio: 1, or 2 in version 2 of the codec. The decoder makes the
            samples of two channels in turn.
        context_duration: seconds that a position of a transformer attends to.
        parts: parts of the decoder, in their order.
    """

    sampling_rate: SampleRate
    downsample_rate: Annotated[int, Bounds(1, 1 << 20)]
    channels: Channels = 1
    context_duration: Seconds
    quantizer: QuantizerSizes
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        channels, samples = self.quantizer.latents, 1
        for index, part in enumerate(self.parts):
            if isinstance(part, TransformerPart):
                if part.input_dimension != channels:
                    raise ConfigError(
                        f"{_PARTS}[{index}].input_dimension: {part.input_dimension}, but the part "
                        f"before it has {channels} channels"
                    )
                channels = part.output_dimension
            else:
                if channels % part.patch_size:
                    raise ConfigError(
                        f"{_PARTS}[{index}].patch_size: {part.patch_size} does not divide "
                        f"{channels} channels"
                    )
                channels, samples = channels // part.patch_size, samples * part.patch_size
        if channels != 1:
            raise ConfigError(f"{_PARTS}: the last part has {channels} channels, expected 1")
        if samples != self.channels * self.downsample_rate:
            raise ConfigError(
                f"downsample_rate: {self.downsample_rate}, but the patches have "
                f"{samples / self.channels:g} samples of each channel for a frame"
            )
        for index, window in self.windows():
            if not 2 <= window <= 1 << 16:
                raise ConfigError(
                    f"{_PARTS}[{index}]: a window of {window} positions; 2 to 65536 are allowed"
                )

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yields the index of each transformer, and the number of positions that a position attends
        to, itself included.
        """
        rate = self.sampling_rate / self.downsample_rate
        for index, part in enumerate(self.parts):
            if isinstance(part, TransformerPart):
                yield index, round(rate * (part.context_duration or self.context_duration))
            else:
                rate *= part.patch_size


@dataclass(frozen=True, kw_only=True)
class MossConfig(CodecConfig):
    """Configuration of a MOSS Audio Tokenizer."""

    sizes: MossSizes

    @property
    def channels(self) -> int:
        return self.sizes.channels


def read(folder: Path) -> MossConfig:
    """Reads the configuration of a folder. Settings of the encoder and of the training are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or of an unsupported variant.
    """
    path = folder / CONFIG_JSON
    document = read_json(path)
    with prefixed(f"{path}: "):
        sizes = _sizes(document)
        rate = sizes.sampling_rate / sizes.downsample_rate
        convert(rate, TokenRate, "frames per second")  # checks its range
    quantizer = sizes.quantizer
    return MossConfig(
        tokens=TokenFormat.codes(quantizer.num_quantizers, quantizer.codebook_size, fewer=True),
        sample_rate=sizes.sampling_rate,
        samples_per_token=sizes.downsample_rate,
        sizes=sizes,
    )


def _sizes(document: dict[str, Any]) -> MossSizes:
    channels = document.get("number_channels")
    channels = 1 if channels is None else convert(channels, Channels, "number_channels")
    if channels > 1 and document.get("enable_channel_interleave") not in (None, True):
        raise ConfigError(
            "enable_channel_interleave: expected true; only decoders that make the samples of the "
            "channels in turn are supported"
        )
    codes = document.get(_CODES) or {}
    if not isinstance(codes, dict):
        raise ConfigError(f"{_CODES}: expected an object, got {type(codes).__name__}")
    seconds, samples = "causal_transformer_context_duration", "downsample_rate"
    rate = document.get("sampling_rate", document.get("sample_rate", 24_000))
    return MossSizes(
        sampling_rate=convert(rate, SampleRate, "sampling_rate"),
        downsample_rate=convert(
            document.get(samples, 1920), Annotated[int, Bounds(1, 1 << 20)], samples
        ),
        channels=channels,
        context_duration=convert(document.get(seconds, 10.0), Seconds, seconds),
        quantizer=from_mapping(QuantizerSizes, known_fields(QuantizerSizes, codes), _CODES),
        parts=_parts(document.get(_PARTS)),
    )


def _parts(entries: Any) -> tuple[Part, ...]:
    if entries is None:
        return _published_parts()
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MOST_PARTS:
        raise ConfigError(f"{_PARTS}: expected a list of 1 to {_MOST_PARTS} objects")
    parts: list[Part] = []
    for index, part in enumerate(entries):
        name = f"{_PARTS}[{index}]"
        if not isinstance(part, dict):
            raise ConfigError(f"{name}: expected an object, got {type(part).__name__}")
        kind = part.get("module_type")
        if kind not in (_TRANSFORMER, _PATCHES):
            raise ConfigError(
                f"{name}.module_type: {kind!r:.40} is neither {_TRANSFORMER} nor {_PATCHES}"
            )
        parts.append(_part(TransformerPart if kind == _TRANSFORMER else PatchPart, part, name))
    return tuple(parts)


def _part(kind: type[TransformerPart] | type[PatchPart], part: dict[str, Any], name: str) -> Part:
    """Reads a part. Settings that only the training needs are skipped."""
    fields = known_fields(kind, part)
    required = {"input_dimension", "output_dimension", "d_model", "num_heads", "num_layers"}
    required |= {"dim_feedforward", "layer_scale"}
    needed = required if kind is TransformerPart else {"patch_size"}
    if missing := sorted(needed - fields.keys()):
        raise ConfigError(f"{name}.{missing[0]}: missing")
    with prefixed(f"{name}."):
        return from_mapping(kind, fields, name)
