"""VibeVoice: causal convolutions and ConvNeXt blocks, for continuous latents at 7.5 Hz.

Its configuration is the `config.json` of one of three published formats.

- The folder of a whole model, as Microsoft published it (`vibevoice`, `vibevoice_streaming`).
- The folder of a whole model of `transformers` (`vibevoice`).
- The folder of the acoustic tokenizer alone, of `transformers` (`vibevoice_acoustic_tokenizer`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from token2wav.config.values import Bounds
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import TRANSFORMERS, Format
from token2wav.published.relations import AsLong, Doubles
from token2wav.published.weight_names import WRAPPERS, WeightNames

MODEL_TYPES = ("vibevoice", "vibevoice_streaming", "vibevoice_acoustic_tokenizer")
WEIGHT_PREFIXES = (
    *("model.acoustic_tokenizer.decoder.", "model.audio_tower.decoder.", "decoder."),
    *("model.speech_scaling_factor", "model.speech_bias_factor"),
    *("model.latent_scaling_factor", "model.latent_bias_factor"),
)
DECODER = "token2wav.families.vibevoice.network:VibeVoiceDecoder"
WEIGHTS = WeightNames(
    parts=WEIGHT_PREFIXES,
    renamed=(
        (r"^model\.(?:speech|latent)_(scaling|bias)_factor$", r"\1_factor"),
        (r"^(?:model\.(?:acoustic_tokenizer|audio_tower)\.)?decoder\.", ""),
        (r"(upsample_layers\.\d+)\.0\.", r"\1."),
        WRAPPERS,
        (r"^stem\.stage\.", "stages.0."),
        (r"^stem\.", "upsample_layers.0."),
        (r"^conv_layers\.(\d{1,3})\.stage\.", lambda match: f"stages.{int(match[1]) + 1}."),
        (r"^conv_layers\.(\d{1,3})\.", lambda match: f"upsample_layers.{int(match[1]) + 1}."),
    ),
)


def _reversed(section: dict[str, Any]) -> dict[str, Any]:
    """Puts the factors of Microsoft's format into the order of the encoder, and its depths into
    lists. Sizes of the decoder replace those of the encoder.
    """
    changed = dict(section)
    for name in ("ratios", "depths"):
        unused = "decoder" if changed.get(f"decoder_{name}") is None else "encoder"
        changed.pop(f"{unused}_{name}", None)
    for name in ("decoder_ratios", "encoder_ratios"):
        if isinstance(changed.get(name), list):
            changed[name] = changed[name][::-1]
    for name, order in (("encoder_depths", 1), ("decoder_depths", -1)):
        if name in changed:
            changed[name] = _depths(changed[name], name)[::order]
    return changed


def _depths(depths: Any, name: str) -> list[int]:
    """Returns depths such as `3-3-8` as a list."""
    numbers = depths.split("-") if isinstance(depths, str) else depths
    if not isinstance(numbers, list) or not all(re.fullmatch(r"\d{1,9}", str(n)) for n in numbers):
        raise ConfigError(f"{name}: {depths!r:.80} is no list of numbers such as 3-3-8")
    return [int(number) for number in numbers]


_UNUSED = (*TRANSFORMERS, "layer_scale_init_value", "vae_std")
FORMATS = {
    "acoustic_tokenizer_config": Format(  # Microsoft
        section="acoustic_tokenizer_config",
        names={
            "hidden_size": "vae_dim",
            "num_filters": "decoder_n_filters",
            "downsampling_ratios": ("decoder_ratios", "encoder_ratios"),
            "depths": ("decoder_depths", "encoder_depths"),
            "rms_norm_eps": "layernorm_eps",
            **dict.fromkeys(("kernel_size", "hidden_act", "ffn_expansion"), ()),
        },
        defaults={"scaled": True},
        only={  # variants
            "causal": True,
            "conv_bias": True,
            "conv_norm": "none",
            "disable_last_norm": True,
            "kernel_size": 7,
            "layernorm": "RMSNorm",
            "layernorm_elementwise_affine": True,
            "mixer_layer": "depthwise_conv",
            "pad_mode": "constant",
        },
        without_effect=(
            *(*_UNUSED, "corpus_normalize", "fix_std", "std_dist_type", "weight_init_value"),
            "encoder_n_filters",
        ),
        prepare=_reversed,
    ),
    "audio_config": Format(
        section="audio_config", defaults={"scaled": True}, without_effect=_UNUSED
    ),
    "": Format(without_effect=_UNUSED),  # the tokenizer alone
}
Depths = Annotated[
    tuple[bounded.Layers, ...], bounded.Stages, AsLong("downsampling_ratios", more=1)
]


@dataclass(frozen=True)
class VibeVoiceSizes(CodecSizes):
    """Sizes of the decoder. Fields and defaults come from `transformers`, except `scaled`.

    Attributes:
        hidden_size: length of a latent.
        kernel_size: kernel of all convolutions, except the upsampling.
        num_filters: channels before the last convolution.
        downsampling_ratios: factors of the encoder; the decoder has them in reverse order.
        depths: ConvNeXt blocks of each stage of the encoder; the decoder has them in reverse order.
        ffn_expansion: factor by which feed-forward parts have more channels inside.
        scaled: whether the weights have a scale and a bias of latents.
    """

    LATENT, FRAME = "hidden_size", ("downsampling_ratios",)

    channels: Annotated[int, Bounds(1, 1)] = 1
    hidden_size: bounded.Width = 64
    kernel_size: bounded.Kernel = 7
    num_filters: Annotated[bounded.Width, Doubles("downsampling_ratios")] = 32
    downsampling_ratios: bounded.SomeRates = (2, 2, 4, 5, 5, 8)
    depths: Depths = (3, 3, 3, 3, 3, 3, 8)
    rms_norm_eps: bounded.Epsilon = 1e-5
    hidden_act: Literal["gelu"] = "gelu"
    ffn_expansion: Annotated[int, Bounds(1, 64)] = 4
    scaled: bool = False

    @property
    def audio_rate(self) -> int:
        return 24_000  # only the configuration of the preprocessor contains it


def _format(document: dict[str, Any]) -> Format:
    section = next((name for name in FORMATS if name in document), "")
    if not section and document.get("model_type") != MODEL_TYPES[-1]:
        names = ", ".join(filter(None, FORMATS))
        raise ConfigError(f"none of {names} is there; this folder has no acoustic decoder")
    return FORMATS[section]


# The longest hop has 1.07 s.
read = CodecConfig.reader(VibeVoiceSizes, _format, hop_blocks=(1, 8))
