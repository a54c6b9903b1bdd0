"""Configuration of Qwen3-TTS's tokenizer and of Qwen3-Omni's Code2Wav, which is read from
`config.json` of a `transformers` folder.
"""

from __future__ import annotations

import math
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
from token2wav.published.registry import unfilled_network
from token2wav.published.sizes import (
    CodebookCount,
    CodebookSize,
    Heads,
    Layers,
    Rates,
    SampleRate,
    Width,
)
from token2wav.published.transformers_json import CONFIG_JSON, read_json

TOKENIZER, OMNI = "qwen3_tts_tokenizer_12hz", "qwen3_omni_moe"
MODEL_TYPES = (TOKENIZER, OMNI)
FILES: tuple[str, ...] = ()

_SECTIONS = {TOKENIZER: "decoder_config", OMNI: "code2wav_config"}
_OMNI_RATE = 24_000  # Hz; the configuration of Qwen3-Omni does not contain it


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder. Fields and defaults are the published ones.

    Attributes:
        codebook_size, num_quantizers: entries of a codebook, and codebooks.
        hidden_size: channels of the transformer, and of Code2Wav's upsampling.
        num_hidden_layers, intermediate_size: layers of the transformer, and channels of their
            feed-forward parts.
        hidden_act: activation of the feed-forward parts.
        rms_norm_eps: added to the mean square in a norm.
        rope_theta: base of rotary positions.
        sliding_window: positions that a position of the transformer attends to.
        attention_bias: whether projections have a bias.
        upsampling_ratios: factors of the upsampling before the decoder.
        upsample_rates: factors of the upsampling in the decoder.
        decoder_dim: channels of the decoder before its first upsampling.
        codebook_dim, latent_dim: only of the tokenizer: channels of the sum of entries, and
            channels around the transformer. None for Code2Wav, which averages embeddings of
            `hidden_size` channels.
    """

    codebook_size: CodebookSize = 2048
    num_quantizers: CodebookCount = 16
    hidden_size: Width = 1024
    num_hidden_layers: Layers = 8
    intermediate_size: Width = 3072
    num_attention_heads: Heads = 16
    num_key_value_heads: Heads = 16
    head_dim: Annotated[int | None, Bounds(1, 1 << 16)] = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Annotated[float, Bounds(1e-12, 1)] = 1e-5
    rope_theta: Annotated[float, Bounds(1, 1e9)] = 10000.0
    sliding_window: Annotated[int, Bounds(2, 1 << 16)] = 72
    attention_bias: bool = False
    upsampling_ratios: Rates = (2, 2)
    upsample_rates: Rates = (8, 5, 4, 3)
    decoder_dim: Width = 1536
    codebook_dim: Annotated[int | None, Bounds(1, 1 << 16)] = None
    latent_dim: Annotated[int | None, Bounds(1, 1 << 16)] = None

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if self.attention_bias:
            raise ConfigError("attention_bias: True is not supported; expected False")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads: {self.num_key_value_heads}, but num_attention_heads is "
                f"{self.num_attention_heads}; they must be equal"
            )
        if self.dim_head % 2:
            raise ConfigError(f"head_dim: {self.dim_head} is odd; rotary positions need pairs")
        if not self.upsample_rates:
            raise ConfigError("upsample_rates: empty; at least 1 is needed")
        if self.decoder_dim % (1 << len(self.upsample_rates)):
            raise ConfigError(
                f"decoder_dim: {self.decoder_dim} cannot be halved {len(self.upsample_rates)} times"
            )
        if self.codebook_dim is not None:
            if self.codebook_dim % 2:
                raise ConfigError(f"codebook_dim: {self.codebook_dim} is odd")
            if self.num_quantizers < 2:
                raise ConfigError("num_quantizers: 1; a semantic and an acoustic one are needed")

    @property
    def dim_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def is_omni(self) -> bool:
        """Whether this is Code2Wav of Qwen3-Omni; else the tokenizer of Qwen3-TTS."""
        return self.codebook_dim is None

    @property
    def prefix(self) -> str:
        """Beginning of the published names of the weights."""
        return "code2wav." if self.is_omni else "decoder."

    @property
    def latents(self) -> int:
        """Channels of the upsampling before the decoder."""
        return self.latent_dim or self.hidden_size

    @property
    def frame_samples(self) -> int:
        """Samples of audio for each frame of codes."""
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(CodecConfig):
    """Configuration of a decoder of Qwen3-TTS or Qwen3-Omni."""

    sizes: DecoderSizes

    @property
    def missing_samples(self) -> int:
        return int(unfilled_network(self, "decoder").missing_samples)


def read(folder: Path) -> Qwen3Config:
    """Reads the configuration of a folder. Settings of the encoder, of the language model and of
    the training are skipped.

    Raises:
        ConfigError: a value is missing, of another type, out of range, or of an unsupported
            variant.
    """
    path = folder / CONFIG_JSON
    document = read_json(path)
    kind = str(document.get("model_type"))
    with prefixed(f"{path}: "):
        name = _SECTIONS[kind]
        section = document.get(name)
        if not isinstance(section, dict):
            raise ConfigError(f"{name}: expected an object; this folder has no decoder")
        sizes = _sizes(section, name, tokenizer=kind == TOKENIZER)
        rate, samples = _OMNI_RATE, sizes.frame_samples
        if kind == TOKENIZER:
            rate = convert(
                document.get("output_sample_rate", rate), SampleRate, "output_sample_rate"
            )
            stated = document.get("decode_upsample_rate", samples)
            if stated != samples:
                raise ConfigError(
                    f"decode_upsample_rate: {stated!r:.80}, but upsample_rates and "
                    f"upsampling_ratios give {samples}"
                )
        return Qwen3Config(
            tokens=TokenFormat.codes(sizes.num_quantizers, sizes.codebook_size),
            sample_rate=rate,
            samples_per_token=samples,
            sizes=sizes,
        )


def _sizes(section: dict[str, Any], name: str, *, tokenizer: bool) -> DecoderSizes:
    fields = known_fields(DecoderSizes, section)
    rope = section.get("rope_parameters") or section.get("rope_scaling")
    if isinstance(rope, dict):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"{name}.rope_type: {kind!r:.80} is not supported; expected default")
        if "rope_theta" in rope:  # its place since transformers 5
            fields["rope_theta"] = rope["rope_theta"]
    if tokenizer:
        fields = {"codebook_dim": 512, "latent_dim": 1024, **fields}  # the published sizes
    else:
        fields = {key: fields[key] for key in fields if key not in ("codebook_dim", "latent_dim")}
    with prefixed(f"{name}."):
        return from_mapping(DecoderSizes, fields, "")
