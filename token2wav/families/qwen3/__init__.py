"""Qwen3-TTS's 12 Hz tokenizer, and Code2Wav of Qwen3-Omni: a causal transformer and a causal
decoder with Snake activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from token2wav.config.values import Bounds
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes, SymmetricSizes
from token2wav.published.formats import ROPE_THETA, ROPE_TYPES, TRANSFORMERS, Format
from token2wav.published.registry import unfilled_network
from token2wav.published.relations import Equals, Even, Halves, Only
from token2wav.published.weight_names import RVQ_CODEBOOKS, RVQ_NAMES, RVQ_UNUSED, WeightNames

_UNUSED = (
    *(*TRANSFORMERS, "layer_scale_initial_scale", "num_semantic_quantizers"),
    *("semantic_codebook_size", "vector_quantization_hidden_dimension", "layer_types"),
)
_TOP = ("output_sample_rate", "decode_upsample_rate")
FORMATS = {
    "qwen3_tts_tokenizer_12hz": Format(
        section="decoder_config",
        names={**ROPE_THETA, **{name: f"/{name}" for name in _TOP}},
        defaults={"codebook_dim": 512, "latent_dim": 1024},  # the published sizes
        only=ROPE_TYPES,
        without_effect=_UNUSED,
    ),
    "qwen3_omni_moe": Format(
        section="code2wav_config",
        names={**ROPE_THETA, **dict.fromkeys(("codebook_dim", "latent_dim", *_TOP), ())},
        only=ROPE_TYPES,
        without_effect=(*_UNUSED, "codebook_dim", "latent_dim"),
    ),
}
MODEL_TYPES = tuple(FORMATS)
WEIGHT_PREFIXES = ("decoder.", "code2wav.")
DECODER = "token2wav.families.qwen3.network:Qwen3Decoder"
WEIGHTS = WeightNames(
    parts=("decoder.", "code2wav."),
    unused=RVQ_UNUSED,
    renamed=(
        (r"^(decoder|code2wav)\.", ""),
        *RVQ_NAMES,
        (r"\.conv\.", "."),  # wrapper
        (r"^pre_transformer\.layers\.", "pre_transformer.transformer.layers."),
        (r"^decoder\.", "decoder.model."),
        (r"\.act([12])\.", r".snake\1."),
    ),
    codebooks=RVQ_CODEBOOKS,
)


@dataclass(frozen=True)
class DecoderSizes(CodecSizes):
    """Sizes of a decoder. Fields and defaults are the published ones.

    Attributes:
        decoder_dim: channels of the decoder before its first upsampling.
        codebook_dim, latent_dim: only of the tokenizer: channels of the sum of entries, and
            channels around the transformer. None for Code2Wav, which averages embeddings of
            `hidden_size` channels.
        output_sample_rate: samples per second; the configuration of Qwen3-Omni does not contain it.
    """

    RATE, FRAME = "output_sample_rate", ("upsampling_ratios", "upsample_rates")

    codebook_size: bounded.CodebookSize = 2048
    num_quantizers: bounded.CodebookCount = 16
    hidden_size: bounded.Width = 1024  # channels of the transformer, and of Code2Wav's upsampling
    num_hidden_layers: bounded.Layers = 8
    intermediate_size: bounded.Width = 3072
    num_attention_heads: bounded.Heads = 16
    num_key_value_heads: Annotated[bounded.Heads, Equals("num_attention_heads")] = 16
    head_dim: bounded.OptionalWidth = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: bounded.Epsilon = 1e-5
    rope_theta: bounded.RopeBase = 10000.0
    sliding_window: bounded.Window = 72
    attention_bias: Annotated[bool, Only(False)] = False
    upsampling_ratios: bounded.Rates = (2, 2)  # factors of the upsampling before the decoder
    upsample_rates: bounded.SomeRates = (8, 5, 4, 3)  # factors of the upsampling in the decoder
    decoder_dim: Annotated[bounded.Width, Halves("upsample_rates")] = 1536
    codebook_dim: Annotated[
        int | None, Bounds(1, 1 << 16), Even("a semantic and an acoustic half are needed")
    ] = None
    latent_dim: bounded.OptionalWidth = None
    output_sample_rate: bounded.SampleRate = 24_000
    decode_upsample_rate: Annotated[
        int | None, Equals("frame_samples", "upsample_rates and upsampling_ratios")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        Even(bounded.PAIRS).check_in(self, self.dim_head, "head_dim")
        if not self.is_omni and self.num_quantizers < 2:
            raise ConfigError("num_quantizers: 1; a semantic and an acoustic one are needed")

    @property
    def dim_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def is_omni(self) -> bool:
        """Whether this is Code2Wav of Qwen3-Omni; else the tokenizer of Qwen3-TTS."""
        return self.codebook_dim is None

    @property
    def latents(self) -> int:
        """Channels of the upsampling before the decoder."""
        return self.latent_dim or self.hidden_size

    @property
    def decoder(self) -> SymmetricSizes:
        return SymmetricSizes.of_decoder(self.upsample_rates, self.decoder_dim, self.latents)


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(CodecConfig):
    sizes: DecoderSizes

    @property
    def missing_samples(self) -> int:
        return int(unfilled_network(self, "decoder").missing_samples)


read = Qwen3Config.reader(DecoderSizes, FORMATS)
