"""Configuration of EAR-TTS's codec, from the `config.json` of a NeMo model such as Nemotron
VoiceChat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, check_bounds, convert, from_mapping, prefixed
from token2wav.errors import ConfigError
from token2wav.published.codec_config import CodecConfig
from token2wav.published.sizes import (
    CodebookCount,
    CodebookSize,
    Kernel,
    Layers,
    Rate,
    Rates,
    SampleRate,
    Width,
)
from token2wav.published.transformers_json import CONFIG_JSON, read_json

FILES: tuple[str, ...] = ()
CONFIG_KEYS = ("data", "model")
PREFIX = "tts_model.audio_codec."  # beginning of the names of the weights

_SECTION = "model.speech_generation.model.codec_config"
_RATE = "model.speech_generation.data.target_sample_rate"


@dataclass(frozen=True, kw_only=True)
class EarTtsSizes:
    """Sizes of the codec. Fields are those of the published configuration.

    Attributes:
        latent_size: channels of the sum of codebook entries.
        n_fft, hop_length: samples of a window, and from a window to the next one.
        base_hidden_size: channels of the decoder's last stage; `channel_mult` multiplies them.
        channel_mult, rates: factors of channels and of upsampling, in the order of the encoder.
        num_blocks: ConvNeXt blocks of each stage.
        kernel_size: kernel of the ConvNeXt blocks.
        groups: groups of the upsampling.
        codebook_size, num_quantizers: entries of a codebook, and number of codebooks.
        wav_to_token_ratio: samples of audio for each frame of codes.
    """

    latent_size: Width
    n_fft: Annotated[int, Bounds(4, 4096)]
    hop_length: Rate
    base_hidden_size: Width
    channel_mult: Rates
    rates: Rates
    num_blocks: Layers
    kernel_size: Kernel
    groups: Width = 1
    codebook_size: CodebookSize
    num_quantizers: CodebookCount
    wav_to_token_ratio: Annotated[int, Bounds(1, 1 << 20)]

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if not self.rates or len(self.channel_mult) != len(self.rates):
            raise ConfigError(
                f"channel_mult: {len(self.channel_mult)} factors, but rates have "
                f"{len(self.rates)}; the same number, at least 1, is needed"
            )
        if self.frame_samples != self.wav_to_token_ratio:
            raise ConfigError(
                f"wav_to_token_ratio: {self.wav_to_token_ratio}, but rates and hop_length give "
                f"{self.frame_samples}"
            )
        if self.n_fft % 2 or self.hop_length % 2 or not self.hop_length < self.n_fft:
            raise ConfigError(
                f"hop_length: {self.hop_length} with n_fft {self.n_fft}; expected even numbers, "
                "and windows that overlap"
            )
        for width in (self.latent_size, *self.widths):
            if width > 1 << 16 or width % self.groups:
                raise ConfigError(
                    f"groups: {self.groups} does not divide {width} channels, or there are more "
                    f"than {1 << 16}"
                )

    @property
    def widths(self) -> list[int]:
        """Channels of each stage of the decoder."""
        return [self.base_hidden_size * factor for factor in reversed(self.channel_mult)]

    @property
    def frame_samples(self) -> int:
        return math.prod(self.rates) * self.hop_length


@dataclass(frozen=True, kw_only=True)
class EarTtsConfig(CodecConfig):
    """Configuration of EAR-TTS's codec."""

    sizes: EarTtsSizes


def read(folder: Path) -> EarTtsConfig:
    """Reads the configuration of a folder. Settings of the language models are skipped.

    Raises:
        ConfigError: a value is missing, of another type, out of range, or does not fit another one.
    """
    path = folder / CONFIG_JSON
    document = read_json(path)
    with prefixed(f"{path}: "):
        values = _nested(document, _SECTION)
        if not isinstance(values, dict):
            raise ConfigError(f"{_SECTION}: expected an object; this folder has no codec")
        fields = EarTtsSizes.__dataclass_fields__
        with prefixed(f"{_SECTION}."):
            if missing := [name for name in fields if name not in values and name != "groups"]:
                raise ConfigError(f"{missing[0]}: missing")
            known = {name: values[name] for name in fields if name in values}
            sizes = from_mapping(EarTtsSizes, known, "")
        rate = _nested(document, _RATE)
        rate = convert(22050 if rate is None else rate, SampleRate, _RATE)
    return EarTtsConfig(
        tokens=TokenFormat.codes(sizes.num_quantizers, sizes.codebook_size),
        sample_rate=rate,
        samples_per_token=sizes.frame_samples,
        sizes=sizes,
    )


def _nested(document: Any, keys: str) -> Any:
    """Returns the value at a path such as `model.data`; None if there is none."""
    for key in keys.split("."):
        document = document.get(key) if isinstance(document, dict) else None
    return document
