"""Mimi, the codec of Moshi, Kyutai TTS, Sesame CSM and others: a causal transformer and a causal
SEANet decoder.

Its configuration is read from `config.json` of a `transformers` folder, or from a folder of the
package `moshi`, which contains the weights of Mimi and of a language model:

    config.json                                  the language model, and names of files
    tokenizer-e351c8d8-checkpoint125.safetensors Mimi
    model.safetensors                            the language model, not read

The sizes of Mimi are constants of the package, unless `mimi_config_name` in `config.json` names a
file with other ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from token2wav.config.values import Bounds, prefixed, shown
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import SeanetSizes
from token2wav.published.formats import MIMI, Format
from token2wav.published.relations import Below, Equals
from token2wav.published.transformers_json import CONFIG_JSON, read_json
from token2wav.published.weight_names import (
    MOSHI_LAYERS,
    RVQ_CODEBOOKS,
    RVQ_NAMES,
    RVQ_UNUSED,
    WRAPPERS,
    WeightNames,
)

MODEL_TYPES = ("mimi",)
FILES = ("tokenizer-*-checkpoint*.safetensors",)  # of `moshi`
MOSHI = Format(
    names={
        "sampling_rate": "sample_rate",
        "audio_channels": "seanet.channels",
        "hidden_size": ("seanet.dimension", "transformer.d_model"),
        "num_filters": "seanet.n_filters",
        "num_residual_layers": "seanet.n_residual_layers",
        "upsampling_ratios": "seanet.ratios",
        "kernel_size": "seanet.kernel_size",
        "last_kernel_size": "seanet.last_kernel_size",
        "residual_kernel_size": "seanet.residual_kernel_size",
        "dilation_growth_rate": "seanet.dilation_base",
        "compress": "seanet.compress",
        "use_causal_conv": "seanet.causal",
        "pad_mode": "seanet.pad_mode",
        "trim_right_ratio": "seanet.trim_right_ratio",
        "codebook_size": "quantizer.bins",
        "codebook_dim": "quantizer.dimension",
        "vector_quantization_hidden_dimension": "quantizer.dimension",
        "num_quantizers": "quantizer.n_q",
        "num_semantic_quantizers": "quantizer.n_q_semantic",
        "upsample_groups": "seanet.dimension",
        "num_hidden_layers": "transformer.num_layers",
        "intermediate_size": "transformer.dim_feedforward",
        "num_attention_heads": "transformer.num_heads",
        "num_key_value_heads": "transformer.num_heads",
        "sliding_window": "transformer.context",
        "rope_theta": "transformer.max_period",
        **dict.fromkeys(
            ("use_conv_shortcut", "head_dim", "hidden_act", "norm_eps", "attention_bias"), ()
        ),
    },
    only={
        "seanet.true_skip": True,
        "seanet.activation": "ELU",
        "seanet.activation_params.alpha": 1.0,
        "seanet.final_activation": None,
        "seanet.norm": "none",
        "transformer.causal": True,
        "transformer.gating": "none",
        "transformer.norm": "layer_norm",
        "transformer.positional_embedding": "rope",
    },
    without_effect=(
        *("channels", "causal", "renormalize", "resample_method", "encoder_frame_rate", "name"),
        *("upsample_channel_wise_bug", "freeze_*", "seanet.*norm*", "seanet.lstm"),
        *("seanet.disable_norm_outer_blocks", "seanet.final_activation_params"),
        *("quantizer.input_dimension", "quantizer.output_dimension", "quantizer.*dropout*"),
        *("quantizer.decay", "quantizer.*codebook*", "quantizer.force_projection"),
        *("transformer.input_dimension", "transformer.output_dimensions"),
        *("transformer.conv_layout", "transformer.layer_scale", "transformer.*dropout*"),
    ),
)
DOWNLOADS = (
    "config.json",
    "mimi_config.json",
    "tokenizer-*-checkpoint*.safetensors|model.safetensors|pytorch_model.bin",
)
DECODER = "token2wav.families.mimi.network:Mimi"
WEIGHTS = WeightNames(
    parts=("quantizer.", "upsample.", "decoder_transformer.", "decoder."),
    unused=RVQ_UNUSED,
    renamed=(
        (r"_residual_vector_quantizer\.", "."),
        *RVQ_NAMES,
        (r"^decoder\.model\.", "decoder.layers."),
        (r"^decoder_transformer\.transformer\.", "decoder_transformer."),
        *(WRAPPERS, *MOSHI_LAYERS),
    ),
    codebooks=RVQ_CODEBOOKS,
)


@dataclass(frozen=True)
class MimiSizes(SeanetSizes):
    """Sizes of Mimi's decoder.

    Attributes:
        frame_rate: frames of codes per second; None for half of the rate of the transformer.
    """

    FEWER_CODES = True

    frame_rate: Annotated[
        float | None,
        Bounds(0.01, 1000),
        Equals("code_rate", "sampling_rate and upsampling_ratios"),
    ] = None
    codebook_size: bounded.CodebookSize = 2048
    codebook_dim: bounded.Width = 256
    num_quantizers: bounded.CodebookCount = 32
    vector_quantization_hidden_dimension: bounded.Width = 256  # length of the sum of entries
    num_semantic_quantizers: Annotated[bounded.CodebookCount, Below("num_quantizers")] = 1

    @property
    def stride(self) -> int:
        inner_rate = math.ceil(self.sampling_rate / math.prod(self.upsampling_ratios))
        return 2 if self.frame_rate is None else max(1, int(inner_rate / self.frame_rate))

    @property
    def code_rate(self) -> float:
        """Frames of codes per second."""
        return self.sampling_rate / self.frame_samples


def read(folder: Path) -> CodecConfig:
    files = sorted(folder.glob(FILES[0]))
    if not files:
        return CodecConfig.reader(MimiSizes, MIMI)(folder)
    weights = _named_file(folder, "mimi_name")
    if weights is None and len(files) > 1:
        raise ConfigError(
            f"{folder}: {len(files)} files match {FILES[0]}; set mimi_name in {CONFIG_JSON}"
        )
    weights = weights or files[0]
    path = _named_file(folder, "mimi_config_name")
    with prefixed(f"{path or weights}: "):
        sizes = MOSHI.read(MimiSizes, read_json(path) if path else {})
        return CodecConfig.of(sizes, weights=(weights.name,))


def _named_file(folder: Path, key: str) -> Path | None:
    """Returns the file of the folder that a key of `config.json` names; None without the key."""
    config = folder / CONFIG_JSON
    name = read_json(config).get(key) if config.is_file() else None
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise ConfigError(f"{config}: {key}: {shown(name)} is no file of the folder")
    return folder / name
