"""XY-Tokenizer, the codec of MOSS-TTSD: transformers that are not causal, and a Vocos.

Its configuration is the YAML file of its authors, or the `config.json` of their folder for
`transformers`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from token2wav.config.strict_yaml import read_yaml
from token2wav.config.values import Bounds, prefixed
from token2wav.config.windows import Windows
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.checkpoint_files import PUBLISHED, only_file
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import TRANSFORMERS, Format
from token2wav.published.relations import Below, Divides, Equals, Even, Only
from token2wav.published.transformers_json import CONFIG_JSON, has_model_type, read_json
from token2wav.published.weight_names import Codebooks, WeightNames
from token2wav.published.window_config import WindowCodecConfig

MODEL_TYPES = ("xy_tokenizer",)
FILES = ("xy_tokenizer*.yaml", "MOSS_TTSD_tokenizer.yaml")
WEIGHTS_FILES = (*PUBLISHED, "xy_tokenizer.ckpt", "MOSS_TTSD_tokenizer")
DECODER = "token2wav.families.xy_tokenizer.network:XYTokenizerDecoder"
WEIGHTS = WeightNames(
    parts=(
        *("quantizer.", "post_rvq_adapter.", "upsample.", "acoustic_decoder."),
        *("enhanced_vocos.", "vocos."),
    ),
    unused=r"positional_embedding|istft\.window|quantizer\.input_proj|"
    r"\.(inited|cluster_size|embed_avg)$",
    renamed=(
        (r"^quantizer\.output_proj\.", "output_proj."),
        (r"^upsample\.up_conv\.", "upsample."),
        (r"^(?:enhanced_)?vocos\.(?:backbone|head)\.", r"vocos."),
        (r"(layers\.\d+)\.(fc[12])\.", r"\1.mlp.\2."),
        (r"(layers\.\d+)\.self_attn_layer_norm\.", r"\1.input_layernorm."),
        (r"(layers\.\d+)\.final_layer_norm\.", r"\1.post_attention_layernorm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    ),
    codebooks=(Codebooks(r"quantizer\.quantizers\.(\d{1,3})\.", "quantizer", ("codebook",)),),
    wrappers=("generator",),
)

# The public code decodes at most 30 s at once. Of a longer utterance it decodes the next 30 s every
# 20 s, and uses the first 20 s of each.
_POSITIONS_SECONDS, _PART_SECONDS = 30, 20
# Of the models with 12.5 frames a second (docs/exactness.md)
_WINDOW, _LEFT, _RIGHT, _OVERLAP = 10, 50, 12, 1

_ADAPTER, _DECODER = "post_rvq_adapter_kwargs", "acoustic_decoder_kwargs"
_NAMES: dict[str, str | tuple[str, ...]] = {
    "num_quantizers": "quantizer_kwargs.num_quantizers",
    "codebook_size": "quantizer_kwargs.codebook_size",
    "codebook_dim": "quantizer_kwargs.codebook_dim",
    "rvq_dim": "quantizer_kwargs.rvq_dim",
    "latent_dim": ("quantizer_kwargs.output_dim", f"{_ADAPTER}.input_dim"),
    "adapter_output_dim": f"{_ADAPTER}.output_dim",
    "d_model": (f"{_ADAPTER}.d_model", "upsample_kwargs.d_model", f"{_DECODER}.d_model"),
    "max_source_positions": f"{_ADAPTER}.max_source_positions",
    "adapter_layers": f"{_ADAPTER}.encoder_layers",
    "adapter_heads": f"{_ADAPTER}.encoder_attention_heads",
    "adapter_ffn_dim": f"{_ADAPTER}.encoder_ffn_dim",
    "stride": "upsample_kwargs.stride",
    "decoder_layers": f"{_DECODER}.decoder_layers",
    "decoder_heads": f"{_DECODER}.decoder_attention_heads",
    "decoder_ffn_dim": f"{_DECODER}.decoder_ffn_dim",
    "num_mel_bins": (f"{_DECODER}.num_mel_bins", "vocos_kwargs.input_channels"),
    "sampling_rate": f"{_DECODER}.sampling_rate",
    "hop_length": f"{_DECODER}.hop_length",
    "stride_size": f"{_DECODER}.stride_size",
    "kernel_size": f"{_DECODER}.kernel_size",
    "max_audio_seconds": f"{_DECODER}.max_audio_seconds",
    "activation_function": f"{_DECODER}.activation_function",
    "vocos_dim": "vocos_kwargs.dim",
    "intermediate_dim": "vocos_kwargs.intermediate_dim",
    "num_layers": "vocos_kwargs.num_layers",
    "n_fft": "vocos_kwargs.n_fft",
    "hop_size": "vocos_kwargs.hop_size",
    "padding": "vocos_kwargs.padding",
    "decoder_upsample_rate": "decoder_upsample_rate",
    "sample_rate": ("output_sample_rate", "sample_rate"),
}
_UNUSED = (
    *("encoder_downsample_rate", "input_sample_rate", "input_sampling_rate"),
    *("feature_extractor_kwargs", "semantic_encoder_kwargs", "semantic_encoder_adapter_kwargs"),
    *("acoustic_encoder_kwargs", "pre_rvq_adapter_kwargs", "downsample_kwargs"),
    *("quantizer_kwargs.input_dim", "quantizer_kwargs.quantizer_dropout"),
    *("quantizer_kwargs.commitment", "quantizer_kwargs.decay", "quantizer_kwargs.epsilon"),
    *("quantizer_kwargs.threshold_ema_dead", "quantizer_kwargs.kmeans_*"),
    *("quantizer_kwargs.skip_rvq_ratio", f"{_DECODER}.scale_embedding"),
)
_ONLY = {f"{_ADAPTER}.activation_function": "gelu", f"{_ADAPTER}.attn_type": "varlen"} | {
    f"{_DECODER}.attn_type": "varlen",
    "vocos_kwargs.adanorm_num_embeddings": None,
}
YAML = Format(section="generator_params", names=_NAMES, without_effect=_UNUSED, only=_ONLY)
JSON = Format(
    section="params",
    names={**_NAMES, "sample_rate": ("/sampling_rate", "output_sample_rate", "sample_rate")},
    without_effect=(*_UNUSED, *TRANSFORMERS),
    only=_ONLY,
)


@dataclass(frozen=True, kw_only=True)
class XYTokenizerSizes(CodecSizes):
    """Sizes of the decoder. Its authors' files have them in several sections.

    Attributes:
        latent_dim: channels of the dequantised codes.
        d_model: channels of both transformers. A frame of codes has `stride` positions in the
            second one, and `latent_dim` is `stride * d_model`.
        max_source_positions: most frames of codes that are decoded at once.
        num_mel_bins: channels between transformers and Vocos.
        sampling_rate, hop_length: samples per second of the recordings of the encoder, and samples
            for each of these channels' frames.
        stride_size: frames for each position of the second transformer.
    """

    RATE, FRAME = "sample_rate", ("stride", "stride_size", "hop_size")

    max_audio_seconds: Annotated[int, Only(_POSITIONS_SECONDS)]
    num_quantizers: bounded.CodebookCount
    codebook_size: bounded.CodebookSize
    codebook_dim: Annotated[bounded.Width, Equals("rvq_dim")]
    rvq_dim: Annotated[bounded.Width, Below("latent_dim")]
    latent_dim: Annotated[bounded.Width, Equals("up_channels", "d_model and stride")]
    adapter_output_dim: Annotated[bounded.Width, Equals("latent_dim")]
    d_model: Annotated[bounded.Width, Even("positions have sines and cosines"), Bounds(4, 1 << 16)]
    max_source_positions: Annotated[
        int, Bounds(3, 1 << 14), Equals("positions", "30 s, sampling_rate, hop_length and strides")
    ]
    adapter_layers: bounded.Layers
    adapter_heads: Annotated[bounded.Heads, Divides("d_model")]
    adapter_ffn_dim: bounded.Width
    stride: bounded.Rate
    decoder_layers: bounded.Layers
    decoder_heads: Annotated[bounded.Heads, Divides("d_model")]
    decoder_ffn_dim: bounded.Width
    num_mel_bins: bounded.Width
    sampling_rate: bounded.SampleRate
    hop_length: bounded.Rate
    stride_size: Annotated[bounded.Rate, Below("kernel_size")]
    kernel_size: Annotated[int, Only(3)]
    activation_function: Literal["gelu"] = "gelu"
    vocos_dim: bounded.Width
    intermediate_dim: bounded.Width
    num_layers: bounded.Layers
    n_fft: bounded.FftSize
    hop_size: bounded.HopSize
    padding: Literal["same"] = "same"
    decoder_upsample_rate: Annotated[
        int | None, Bounds(1, 1 << 20), Equals("frame_samples", "strides and hop_size")
    ] = None
    sample_rate: Annotated[
        bounded.SampleRate, Equals("audio_rate_of_hops", "hop_length and hop_size")
    ]

    @property
    def up_channels(self) -> int:
        return self.stride * self.d_model

    @property
    def audio_rate_of_hops(self) -> float:
        """Samples per second that have as many frames as the recordings of the encoder."""
        return self.sampling_rate / self.hop_length * self.hop_size

    @property
    def positions(self) -> int:
        """Most frames of codes that are decoded at once, by the seconds of the decoder."""
        return (
            _POSITIONS_SECONDS
            * self.sampling_rate
            // (self.hop_length * self.stride_size * self.stride)
        )


def read(folder: Path) -> WindowCodecConfig:
    if has_model_type(folder, *MODEL_TYPES):
        path, format_ = folder / CONFIG_JSON, JSON
        document = read_json(path)
    else:
        file = only_file(folder, FILES)
        assert file is not None  # the folder was recognised by this file
        path, format_ = file, YAML
        document = read_yaml(path)
    with prefixed(f"{path}: "):
        if not isinstance(document, dict):
            raise ConfigError(f"expected a mapping, got {type(document).__name__}")
        sizes = format_.read(XYTokenizerSizes, document)
        return WindowCodecConfig.of(
            sizes, weights=WEIGHTS_FILES, windows=_windows(sizes), whole=whole_windows(sizes)
        )


def whole_windows(sizes: XYTokenizerSizes) -> Windows:
    """Returns the windows in which the public code decodes an utterance."""
    most = sizes.max_source_positions
    part = most * _PART_SECONDS // _POSITIONS_SECONDS
    return Windows(part, left=0, right=most - part, overlap=0, part=part)


def _windows(sizes: XYTokenizerSizes) -> Windows:
    whole = whole_windows(sizes)
    block = math.gcd(_WINDOW, whole.part)
    right = min(_RIGHT, whole.right)
    return Windows(block, _LEFT, right, min(_OVERLAP, block, right), whole.part)
