"""Configuration of the causal DAC, from the `config.json` of a model of Fish Audio or Audio8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, check_bounds, from_mapping, known_fields, prefixed
from token2wav.errors import ConfigError
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import SymmetricSizes
from token2wav.published.sizes import CodebookSize, Heads, Layers, Rates, SampleRate, Width
from token2wav.published.transformers_json import CONFIG_JSON, read_json

WEIGHTS = "codec.pth"
FILES = (WEIGHTS,)
MODEL_TYPES = ("dual_ar", "fish_qwen3_omni", "arktts")  # Fish Audio's S1 and S2-Pro, Audio8

_HOP_BLOCKS = (1, 32)  # the longest hop has 1.5 s
_AUDIO8 = {"codec_post_n_local_heads": 8, "codec_post_intermediate_size": 1216}  # defaults


@dataclass(frozen=True)
class CausalDacSizes:
    """Sizes of the decoder. Fields have the names of `config.json`, and defaults are those of Fish
    Audio. Published files have at most the fields up to `codec_post_intermediate_size`; the public
    code fixes the others.

    Attributes:
        num_codebooks: a semantic codebook and residual ones.
        codebook_size: entries of the semantic codebook.
        codec_sample_rate: samples per second.
        codec_post_n_layer, codec_post_intermediate_size: layers of the transformer, and channels of
            their feed-forward parts.
        codec_post_n_head, codec_post_n_local_heads: heads of its queries, and of its keys.
        codec_head_dim: channels of a head.
        codec_window_size: positions that a position of the transformer attends to.
        codec_residual_codebook_size: entries of a residual codebook.
        codec_codebook_dim: length of an entry.
        codec_latent_dim: channels of the transformer, and of the upsampling before the decoder.
        codec_downsample_factor: factors of the encoder; this upsampling has them in reverse order.
        codec_decoder_dim: channels before the first upsampling of the decoder, which all halve
            them.
        codec_decoder_rates: factors of the upsampling of the decoder.
    """

    num_codebooks: Annotated[int, Bounds(2, 64)] = 10
    codebook_size: CodebookSize = 4096
    codec_filename: Literal["codec.pth"] = "codec.pth"
    codec_sample_rate: SampleRate = 44_100
    codec_post_n_layer: Layers = 8
    codec_post_n_head: Heads = 16
    codec_post_n_local_heads: Heads = 16
    codec_post_intermediate_size: Width = 3072
    codec_head_dim: Width = 64
    codec_window_size: Annotated[int, Bounds(2, 1 << 16)] = 128
    codec_residual_codebook_size: CodebookSize = 1024
    codec_codebook_dim: Width = 8
    codec_latent_dim: Width = 1024
    codec_downsample_factor: Rates = (2, 2)
    codec_decoder_dim: Width = 1536
    codec_decoder_rates: Rates = (8, 8, 4, 2)

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if self.codec_post_n_head % self.codec_post_n_local_heads:
            raise ConfigError(
                f"codec_post_n_local_heads: {self.codec_post_n_local_heads} does not divide "
                f"codec_post_n_head, {self.codec_post_n_head}"
            )
        if self.codec_head_dim % 2:
            raise ConfigError(
                f"codec_head_dim: {self.codec_head_dim} is odd; rotary positions need pairs"
            )
        halvings = len(self.codec_decoder_rates)
        if not halvings:
            raise ConfigError("codec_decoder_rates: empty; at least 1 is needed")
        if self.codec_decoder_dim % (1 << halvings):
            raise ConfigError(
                f"codec_decoder_dim: {self.codec_decoder_dim} cannot be halved {halvings} times"
            )

    @property
    def frame_samples(self) -> int:
        """Samples of audio for each frame of codes."""
        return math.prod(self.codec_downsample_factor) * math.prod(self.codec_decoder_rates)

    @property
    def decoder(self) -> SymmetricSizes:
        return SymmetricSizes.of_decoder(
            self.codec_decoder_rates, self.codec_decoder_dim, self.codec_latent_dim
        )


@dataclass(frozen=True, kw_only=True)
class CausalDacConfig(CodecConfig):
    """Configuration of the causal DAC."""

    sizes: CausalDacSizes
    weights: tuple[str, ...] = FILES


def read(folder: Path) -> CausalDacConfig:
    """Reads the configuration of a folder, which is that of Fish Audio if there is no
    `config.json`. Settings of the language model are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or does not fit another one; or the
            folder is one of another model.
    """
    path = folder / CONFIG_JSON
    document = read_json(path) if path.is_file() else {}
    with prefixed(f"{path}: "):
        kind = document.get("model_type", MODEL_TYPES[0])
        if kind not in MODEL_TYPES:
            raise ConfigError(
                f"model_type: {kind!r:.80} is not supported; expected one of "
                f"{', '.join(MODEL_TYPES)}"
            )
        if isinstance(section := document.get("text_config"), dict):  # of S2-Pro
            document = {**section, **document}
        fields = known_fields(CausalDacSizes, document)
        if kind == "arktts":
            fields = {**_AUDIO8, **fields}
        sizes = from_mapping(CausalDacSizes, fields, "")
        samples = sizes.frame_samples
        if (stated := document.get("codec_frame_size", samples)) != samples:
            raise ConfigError(
                f"codec_frame_size: {stated!r:.80}, but codec_downsample_factor and "
                f"codec_decoder_rates give {samples}"
            )
    residual = (sizes.codec_residual_codebook_size,) * (sizes.num_codebooks - 1)
    return CausalDacConfig(
        tokens=TokenFormat.uneven_codes((sizes.codebook_size, *residual)),
        sample_rate=sizes.codec_sample_rate,
        samples_per_token=samples,
        hop_blocks=_HOP_BLOCKS,
        sizes=sizes,
    )
