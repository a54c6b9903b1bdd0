"""Configuration of VoxCPM's AudioVAE, from the `config.json` of VoxCPM2, or of VoxCPM 0.5B and 1.5,
whose AudioVAE is older.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import SymmetricSizes
from token2wav.published.sizes import Rates, SampleRate, TokenRate, Width
from token2wav.published.transformers_json import CONFIG_JSON, read_json

FILES = ("audiovae.safetensors", "audiovae.pth")  # in order of preference
_SECTION = "audio_vae_config"  # missing in VoxCPM 0.5B
CONFIG_KEYS = (_SECTION,)

_HOP_BLOCKS = (1, 32)  # the longest hop has 1.28 s
Architecture = Literal["voxcpm", "voxcpm2"]
# The older AudioVAE has other defaults, and no layers for a sample rate.
_OLDER_DEFAULTS = {"decoder_dim": 1536, "decoder_rates": [8, 8, 5, 2]}
_OLDER_ALWAYS = {"out_sample_rate": None, "sr_bin_boundaries": None}

Boundaries = Annotated[tuple[SampleRate, ...] | None, Length(64)]


@dataclass(frozen=True)
class VoxCPMSizes:
    """Sizes of the decoder. Fields and defaults come from VoxCPM2.

    Attributes:
        encoder_rates, sample_rate: factors and sample rate of the encoder, which give the number of
            latents per second.
        latent_dim: length of a latent.
        decoder_dim: channels before the first upsampling. Every upsampling halves them.
        decoder_rates: factor of each upsampling.
        depthwise: whether the convolutions filter every channel by itself.
        out_sample_rate: samples per second of the audio; None for `sample_rate`.
        sr_bin_boundaries: boundaries between ranges of sample rates, in ascending order. Each range
            has a scale and a bias of all channels before every upsampling. None for a decoder
            without them.
        use_noise_block, cond_type, cond_out_layer: variants; only the published variant is
            supported. The two values of `cond_type` differ in training only.
    """

    encoder_rates: Rates = (2, 5, 8, 8)
    sample_rate: SampleRate = 16_000
    latent_dim: Width = 64
    decoder_dim: Width = 2048
    decoder_rates: Rates = (8, 6, 5, 2, 2, 2)
    depthwise: bool = True
    out_sample_rate: Annotated[int | None, Bounds(1, 768_000)] = 48_000
    sr_bin_boundaries: Boundaries = (20_000, 30_000, 40_000)
    use_noise_block: bool = False
    cond_type: Literal["scale_bias", "scale_bias_init"] = "scale_bias"
    cond_out_layer: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, "")
        for name in ("use_noise_block", "cond_out_layer"):
            if getattr(self, name):
                raise ConfigError(f"{name}: True is not supported; expected False")
        for name in ("encoder_rates", "decoder_rates"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: empty; at least 1 is needed")
        if self.decoder_dim % (1 << len(self.decoder_rates)):
            raise ConfigError(
                f"decoder_dim: {self.decoder_dim} cannot be halved {len(self.decoder_rates)} times"
            )
        boundaries = list(self.sr_bin_boundaries or ())
        if boundaries != sorted(boundaries):
            raise ConfigError(f"sr_bin_boundaries: {boundaries} are not in ascending order")
        rate = self.sample_rate * self.frame_samples / math.prod(self.encoder_rates)
        if self.audio_rate != rate:
            raise ConfigError(
                f"out_sample_rate: {self.audio_rate} is not supported; expected {rate:.10g}, which "
                "sample_rate, encoder_rates and decoder_rates give"
            )

    @property
    def audio_rate(self) -> int:
        """Samples per second of the audio."""
        return self.out_sample_rate or self.sample_rate

    @property
    def frame_samples(self) -> int:
        """Samples of audio for each latent."""
        return math.prod(self.decoder_rates)

    @property
    def rate_range(self) -> int:
        """Index of the range that contains the sample rate of the audio."""
        return bisect_left(self.sr_bin_boundaries or (), self.audio_rate)

    @property
    def decoder(self) -> SymmetricSizes:
        return SymmetricSizes.of_decoder(self.decoder_rates, self.decoder_dim, self.latent_dim)


@dataclass(frozen=True, kw_only=True)
class VoxCPMConfig(CodecConfig):
    """Configuration of VoxCPM's AudioVAE."""

    sizes: VoxCPMSizes
    weights: tuple[str, ...] = FILES


def read(folder: Path) -> VoxCPMConfig:
    """Reads the configuration of a folder. Settings of the encoder and of the language model are
    skipped.

    Raises:
        ConfigError: a value is of another type, out of range, of an unsupported variant, or does
            not fit another one.
    """
    path = folder / CONFIG_JSON
    document = read_json(path)
    with prefixed(f"{path}: "):
        name = str(document.get("architecture", "voxcpm")).lower()
        older = convert(name, Architecture, "architecture") == "voxcpm"
        section: Any = document.get(_SECTION) or {}
        if not isinstance(section, dict):
            raise ConfigError(f"{_SECTION}: expected an object, got {type(section).__name__}")
        values = _OLDER_DEFAULTS | section | _OLDER_ALWAYS if older else section
        with prefixed(f"{_SECTION}."):
            sizes = from_mapping(VoxCPMSizes, known_fields(VoxCPMSizes, values), "")
            rate = sizes.audio_rate / sizes.frame_samples
            convert(rate, TokenRate, "decoder_rates: latents per second")  # checks its range
    return VoxCPMConfig(
        tokens=TokenFormat.latents(sizes.latent_dim),
        sample_rate=sizes.audio_rate,
        samples_per_token=sizes.frame_samples,
        hop_blocks=_HOP_BLOCKS,
        sizes=sizes,
    )
