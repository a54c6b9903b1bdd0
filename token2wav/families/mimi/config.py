"""Configuration of Mimi, which is read from `config.json` of a `transformers` folder, or from a
folder of `moshi`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from token2wav.config.transformers_json import CONFIG_JSON, read_json
from token2wav.config.values import Bounds, check_bounds, from_mapping, kinds, prefixed
from token2wav.errors import CheckpointError, ConfigError
from token2wav.families.mimi.moshi_config import (
    WEIGHTS_PATTERN,
    moshi_weights_file,
    read_moshi_sizes,
)
from token2wav.model_config import ModelConfig, StageName
from token2wav.networks.configs import (
    CodebookCount,
    CodebookSize,
    Heads,
    Kernel,
    Layers,
    Rate,
    Rates,
    SampleRate,
    Width,
)

MODEL_TYPES = ("mimi",)
FILES = (WEIGHTS_PATTERN,)
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")

_HOP_BLOCKS = (1, 16)  # frames of the first hop and of the longest hop
_ROPE_BASE = 10000.0


_Sizes = TypeVar("_Sizes", bound="DecoderSizes")


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a transformer and a SEANet decoder, which Mimi shares with codecs of latents. Fields
    and defaults are those that `transformers` publishes.

    Attributes:
        sampling_rate: samples per second.
        audio_channels: channels of the audio.
        hidden_size: channels of the transformer.
        num_filters: channels before the last convolution.
        num_residual_layers: residual units after each upsampling.
        upsampling_ratios: factor of each upsampling of the decoder.
        kernel_size, last_kernel_size, residual_kernel_size: kernels of the first and of the last
            convolution, and of the residual units.
        dilation_growth_rate: factor from the dilation of a residual unit to the next one.
        use_causal_conv, pad_mode, trim_right_ratio, use_conv_shortcut: variants of the
            convolutions, of which only the published one is supported.
        compress: factor by which a residual unit has fewer channels inside.
        upsample_groups: groups of the upsampling before the transformer.
        num_hidden_layers, intermediate_size: layers of the transformer, and channels of their
            feed-forward parts.
        num_attention_heads, num_key_value_heads, head_dim: heads of the transformer.
        hidden_act: activation of the feed-forward parts.
        norm_eps: added to the variance in a norm.
        rope_theta: base of rotary positions.
        sliding_window: positions that a position of the transformer attends to.
        attention_bias: whether projections have a bias.
    """

    sampling_rate: SampleRate = 24000
    audio_channels: Annotated[int, Bounds(1, 1)] = 1
    hidden_size: Width = 512
    num_filters: Width = 64
    num_residual_layers: Layers = 1
    upsampling_ratios: Rates = (8, 6, 5, 4)
    kernel_size: Kernel = 7
    last_kernel_size: Kernel = 3
    residual_kernel_size: Kernel = 3
    dilation_growth_rate: Rate = 2
    use_causal_conv: bool = True
    pad_mode: Literal["constant"] = "constant"
    compress: Rate = 2
    trim_right_ratio: Annotated[float, Bounds(1, 1)] = 1.0
    use_conv_shortcut: bool = False
    upsample_groups: Width = 512
    num_hidden_layers: Layers = 8
    intermediate_size: Width = 2048
    num_attention_heads: Heads = 8
    num_key_value_heads: Heads = 8
    head_dim: Annotated[int | None, Bounds(1, 1 << 16)] = None
    hidden_act: Literal["gelu", "gelu_pytorch_tanh"] = "gelu"
    norm_eps: Annotated[float, Bounds(1e-12, 1)] = 1e-5
    rope_theta: Annotated[float, Bounds(1, 1e9)] = _ROPE_BASE
    sliding_window: Annotated[int, Bounds(2, 1 << 16)] = 250
    attention_bias: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, "")
        for name, only in (
            ("use_causal_conv", True),
            ("use_conv_shortcut", False),
            ("attention_bias", False),
        ):
            if getattr(self, name) != only:
                raise ConfigError(f"{name}: {not only} is not supported; expected {only}")
        if not self.upsampling_ratios:
            raise ConfigError("upsampling_ratios: empty; at least 1 is needed")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads: {self.num_key_value_heads}, but num_attention_heads is "
                f"{self.num_attention_heads}; they must be equal"
            )
        if self.hidden_size % self.upsample_groups:
            raise ConfigError(
                f"upsample_groups: {self.upsample_groups} does not divide hidden_size, "
                f"{self.hidden_size}"
            )
        if self.dim_head % 2:
            raise ConfigError(f"head_dim: {self.dim_head} is odd; rotary positions need pairs")

    @property
    def dim_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def stride(self) -> int:
        """Positions of the transformer for each frame of codes or latents."""
        raise NotImplementedError

    @property
    def frame_samples(self) -> int:
        """Samples of audio for each frame of codes or latents."""
        return self.stride * math.prod(self.upsampling_ratios)


@dataclass(frozen=True)
class MimiSizes(DecoderSizes):
    """Sizes of Mimi's decoder.

    Attributes:
        frame_rate: frames of codes per second; None for half of the rate of the transformer.
        codebook_size, codebook_dim: entries of a codebook, and their length.
        num_quantizers, num_semantic_quantizers: number of codebooks, and of semantic ones.
        vector_quantization_hidden_dimension: length of the sum of entries.
    """

    frame_rate: Annotated[float | None, Bounds(0.01, 1000)] = None
    codebook_size: CodebookSize = 2048
    codebook_dim: Width = 256
    num_quantizers: CodebookCount = 32
    vector_quantization_hidden_dimension: Width = 256
    num_semantic_quantizers: CodebookCount = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_semantic_quantizers >= self.num_quantizers:
            raise ConfigError(
                f"num_semantic_quantizers: {self.num_semantic_quantizers} is not below "
                f"num_quantizers, {self.num_quantizers}"
            )
        rate = self.sampling_rate / self.frame_samples
        if self.frame_rate is not None and abs(self.frame_rate - rate) > 1e-6 * rate:
            raise ConfigError(
                f"frame_rate: {self.frame_rate:g}, but sampling_rate and upsampling_ratios give "
                f"{rate:g}"
            )

    @property
    def stride(self) -> int:
        inner_rate = math.ceil(self.sampling_rate / math.prod(self.upsampling_ratios))
        return 2 if self.frame_rate is None else max(1, int(inner_rate / self.frame_rate))


@dataclass(frozen=True, kw_only=True)
class MimiConfig(ModelConfig):
    """Configuration of a Mimi model.

    Attributes:
        sizes: sizes of the decoder.
    """

    sizes: MimiSizes

    def stage_config(self, stage: StageName) -> Any:
        return self.sizes

    def weights_file(self, folder: Path, stage: StageName) -> Path:
        return moshi_weights_file(folder) or weights_file(folder)


def weights_file(folder: Path) -> Path:
    """Finds the weights in a `transformers` folder.

    Raises:
        CheckpointError: the folder has no such file.
    """
    for name in WEIGHTS_FILES:
        if (path := folder / name).is_file():
            return path
    raise CheckpointError(f"{folder}: contains none of {', '.join(WEIGHTS_FILES)}")


def read(folder: Path) -> MimiConfig:
    """Reads the configuration of a folder. Settings of the encoder and of the training are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or of an unsupported variant.
    """
    if (weights := moshi_weights_file(folder)) is not None:
        with prefixed(f"{weights}: "):
            return config_of(from_mapping(MimiSizes, read_moshi_sizes(folder), ""))
    return config_of(read_sizes(folder, MimiSizes))


def read_sizes(folder: Path, kind: type[_Sizes]) -> _Sizes:
    """Reads sizes from the `config.json` of a `transformers` folder. Other settings are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or of an unsupported variant.
    """
    path = folder / CONFIG_JSON
    document = read_json(path)
    with prefixed(f"{path}: "):
        rope = document.get("rope_parameters")
        if isinstance(rope, dict):  # its place since transformers 5
            if (variant := rope.get("rope_type", "default")) != "default":
                raise ConfigError(f"rope_parameters.rope_type: {variant!r} is not default")
            if "rope_theta" in rope:
                document["rope_theta"] = rope["rope_theta"]
        own = {name: value for name, value in document.items() if name in kinds(kind)}
        return from_mapping(kind, own, "")


def config_of(sizes: MimiSizes) -> MimiConfig:
    """Returns the configuration of a model with these sizes."""
    samples = sizes.frame_samples
    return MimiConfig(
        vocab_size=sizes.codebook_size,
        token_frame_rate=sizes.sampling_rate / samples,
        token_shape=(sizes.num_quantizers,),
        fewer_codebooks=True,
        block_tokens=1,
        token_mel_ratio=1,
        mel_bands=sizes.num_quantizers,
        speaker_size=0,
        sample_rate=sizes.sampling_rate,
        stages=("decoder",),
        samples_per_token=samples,
        hop_blocks=_HOP_BLOCKS,
        takes_prompt=False,
        sizes=sizes,
    )
