"""Configuration of VibeVoice's acoustic decoder, from the `config.json` of three published formats.

- The folder of a whole model, as Microsoft published it (`vibevoice`, `vibevoice_streaming`).
- The folder of a whole model of `transformers` (`vibevoice`).
- The folder of the acoustic tokenizer alone, of `transformers` (`vibevoice_acoustic_tokenizer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, check_bounds, from_mapping, known_fields, prefixed
from token2wav.errors import ConfigError
from token2wav.published.codec_config import CodecConfig
from token2wav.published.sizes import Kernel, Layers, Rates, Stages, Width
from token2wav.published.transformers_json import CONFIG_JSON, read_json

FILES: tuple[str, ...] = ()
MODEL_TYPES = ("vibevoice", "vibevoice_streaming", "vibevoice_acoustic_tokenizer")

_RATE = 24_000  # Hz; only the configuration of the preprocessor contains it
_HOP_BLOCKS = (1, 8)  # the longest hop has 1.07 s
# Variants of Microsoft's format, of which only the published ones are supported
_ALWAYS = {
    "causal": True,
    "conv_bias": True,
    "conv_norm": "none",
    "disable_last_norm": True,
    "layernorm": "RMSNorm",
    "layernorm_elementwise_affine": True,
    "mixer_layer": "depthwise_conv",
    "pad_mode": "constant",
}


@dataclass(frozen=True)
class Layout:
    """Names of the weights in a published format.

    Attributes:
        section: key of the decoder's sizes in `config.json`; empty for the whole file.
        prefix: beginning of the names of the decoder's weights.
        factors: names of the scale and the bias of latents; empty if the folder has none.
    """

    section: str
    prefix: str
    factors: tuple[str, ...] = ()


LAYOUTS = {
    "microsoft": Layout(
        "acoustic_tokenizer_config",
        "model.acoustic_tokenizer.decoder.",
        ("model.speech_scaling_factor", "model.speech_bias_factor"),
    ),
    "transformers": Layout(
        "audio_config",
        "model.audio_tower.decoder.",
        ("model.latent_scaling_factor", "model.latent_bias_factor"),
    ),
    "tokenizer": Layout("", "decoder."),
}


@dataclass(frozen=True)
class VibeVoiceSizes:
    """Sizes of the decoder. Fields and defaults come from `transformers`, except `layout`.

    Attributes:
        channels: channels of the audio.
        hidden_size: length of a latent.
        kernel_size: kernel of all convolutions, except the upsampling.
        num_filters: channels before the last convolution.
        downsampling_ratios: factors of the encoder; the decoder has them in reverse order.
        depths: ConvNeXt blocks of each stage of the encoder; the decoder has them in reverse order.
        rms_norm_eps: added to the mean square in a norm.
        ffn_expansion: factor by which feed-forward parts have more channels inside.
        layout: published format, a key of `LAYOUTS`.
    """

    channels: Annotated[int, Bounds(1, 1)] = 1
    hidden_size: Width = 64
    kernel_size: Kernel = 7
    num_filters: Width = 32
    downsampling_ratios: Rates = (2, 2, 4, 5, 5, 8)
    depths: Annotated[tuple[Layers, ...], Stages] = (3, 3, 3, 3, 3, 3, 8)
    rms_norm_eps: Annotated[float, Bounds(1e-12, 1)] = 1e-5
    hidden_act: Literal["gelu"] = "gelu"
    ffn_expansion: Annotated[int, Bounds(1, 64)] = 4
    layout: Literal["microsoft", "transformers", "tokenizer"] = "tokenizer"

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if not self.downsampling_ratios:
            raise ConfigError("downsampling_ratios: empty; at least 1 is needed")
        if len(self.depths) != len(self.downsampling_ratios) + 1:
            raise ConfigError(
                f"depths: {len(self.depths)} stages, but downsampling_ratios have "
                f"{len(self.downsampling_ratios)}; one stage more is needed"
            )
        if self.num_filters << len(self.downsampling_ratios) > 1 << 16:
            raise ConfigError(
                f"num_filters: {self.num_filters} gives more than {1 << 16} channels after "
                f"{len(self.downsampling_ratios)} doublings"
            )

    @property
    def frame_samples(self) -> int:
        """Samples of audio for each latent."""
        return math.prod(self.downsampling_ratios)


@dataclass(frozen=True, kw_only=True)
class VibeVoiceConfig(CodecConfig):
    """Configuration of VibeVoice's acoustic decoder."""

    sizes: VibeVoiceSizes


def read(folder: Path) -> VibeVoiceConfig:
    """Reads the configuration of a folder. Settings of the encoders, of the language model and of
    the diffusion head are skipped.

    Raises:
        ConfigError: a value is missing, of another type, out of range, or of an unsupported
            variant.
    """
    path = folder / CONFIG_JSON
    document = read_json(path)
    sections = [name for name, layout in LAYOUTS.items() if layout.section in document]
    layout = "tokenizer" if document.get("model_type") == MODEL_TYPES[-1] else (sections or [""])[0]
    with prefixed(f"{path}: "):
        if not layout:
            keys = ", ".join(layout.section for layout in LAYOUTS.values() if layout.section)
            raise ConfigError(f"none of {keys} is there; this folder has no acoustic decoder")
        section = LAYOUTS[layout].section
        values = document[section] if section else document
        if not isinstance(values, dict):
            raise ConfigError(f"{section}: expected an object")
        with prefixed(f"{section}." if section else ""):
            if layout == "microsoft":
                values = _current_names(values)
            sizes = from_mapping(
                VibeVoiceSizes, {**known_fields(VibeVoiceSizes, values), "layout": layout}, ""
            )
    return VibeVoiceConfig(
        tokens=TokenFormat.latents(sizes.hidden_size),
        sample_rate=_RATE,
        samples_per_token=sizes.frame_samples,
        hop_blocks=_HOP_BLOCKS,
        sizes=sizes,
    )


def _current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes in Microsoft's format under the names of `transformers`.

    Raises:
        ConfigError: an unsupported variant, or a list of another form.
    """
    for name, only in _ALWAYS.items():
        if (value := values.get(name, only)) != only:
            raise ConfigError(f"{name}: {value!r:.80} is not supported; expected {only!r}")
    # Factors are in the order of the decoder, depths in the order of their coder.
    ratios = values.get("decoder_ratios") or values.get("encoder_ratios")
    depths = _depths(values, "encoder_depths")
    if decoder := _depths(values, "decoder_depths"):
        depths = decoder[::-1]
    renamed = {
        "channels": values.get("channels"),
        "hidden_size": values.get("vae_dim"),
        "num_filters": values.get("decoder_n_filters"),
        "downsampling_ratios": ratios[::-1] if isinstance(ratios, list) else ratios,
        "depths": depths,
        "rms_norm_eps": values.get("layernorm_eps"),
    }
    return {name: value for name, value in renamed.items() if value is not None}


def _depths(values: Mapping[str, Any], name: str) -> list[int] | None:
    """Returns depths such as `3-3-8` as a list; None if there are none."""
    depths = values.get(name)
    if depths is None:
        return None
    numbers = depths.split("-") if isinstance(depths, str) else depths
    if not isinstance(numbers, list) or not all(str(number).isdecimal() for number in numbers):
        raise ConfigError(f"{name}: {depths!r:.80} is no list of numbers such as 3-3-8")
    return [int(number) for number in numbers]
