"""Sizes of the decoders that several codecs share. The module does not import torch."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

from token2wav.config.values import Bounds, check_bounds
from token2wav.errors import ConfigError
from token2wav.published.sizes import Heads, Kernel, Layers, Rate, Rates, SampleRate, Width

_ROPE_BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class SymmetricSizes:
    """Sizes of a symmetric decoder. Fields and defaults are those of DAC in `transformers`.

    Attributes:
        encoder_hidden_size: channels of the encoder before its first downsampling.
        decoder_hidden_size: channels of the decoder before its first upsampling. Every upsampling
            halves them.
        hidden_size: channels of the latents; None for the channels of the encoder's output.
        upsampling_ratios: factor of each upsampling; empty for the reversed factors of the encoder.
    """

    encoder_hidden_size: Width = 64
    downsampling_ratios: Rates = (2, 4, 8, 8)
    decoder_hidden_size: Width = 1536
    hidden_size: Annotated[int | None, Bounds(1, 1 << 16)] = None
    upsampling_ratios: Rates = ()

    @classmethod
    def of_decoder(cls, rates: tuple[int, ...], channels: int, latents: int) -> SymmetricSizes:
        """Returns the sizes of a decoder whose configuration has none of the encoder.

        Args:
            channels: channels before the first upsampling.
        """
        return cls(
            downsampling_ratios=rates[::-1], decoder_hidden_size=channels, hidden_size=latents
        )

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if not self.rates:
            raise ConfigError("downsampling_ratios: empty; at least 1 is needed")
        if math.prod(self.rates) != math.prod(self.downsampling_ratios):
            raise ConfigError(
                f"upsampling_ratios: {self.frame_samples} samples for each frame, but "
                f"downsampling_ratios give {math.prod(self.downsampling_ratios)}"
            )
        if self.decoder_hidden_size % (1 << len(self.rates)):
            raise ConfigError(
                f"decoder_hidden_size: {self.decoder_hidden_size} cannot be halved "
                f"{len(self.rates)} times"
            )
        if self.latents > 1 << 16:
            raise ConfigError(
                f"encoder_hidden_size: {self.encoder_hidden_size} gives {self.latents} channels of "
                f"the latents; at most {1 << 16} are allowed"
            )

    @property
    def rates(self) -> tuple[int, ...]:
        """Factor of each upsampling."""
        return self.upsampling_ratios or self.downsampling_ratios[::-1]

    @property
    def latents(self) -> int:
        """Channels of the latents."""
        return self.hidden_size or self.encoder_hidden_size << len(self.downsampling_ratios)

    @property
    def frame_samples(self) -> int:
        """Audio samples for each frame of codes."""
        return math.prod(self.rates)


@dataclass(frozen=True)
class SeanetSizes:
    """Sizes for a transformer and a SEANet decoder. Fields and defaults are those of Mimi in
    `transformers`.

    Attributes:
        hidden_size: channels of the transformer.
        num_filters: channels before the last convolution.
        num_residual_layers: residual units after each upsampling.
        upsampling_ratios: factor of each upsampling of the decoder.
        kernel_size, last_kernel_size, residual_kernel_size: kernels of the first and of the last
            convolution, and of the residual units.
        dilation_growth_rate: factor from the dilation of a residual unit to the next one.
        use_causal_conv, pad_mode, trim_right_ratio, use_conv_shortcut, attention_bias: variants, of
            which only the published one is supported.
        compress: factor by which a residual unit has fewer channels inside.
        upsample_groups: groups of the upsampling before the transformer.
        sliding_window: positions that a position of the transformer attends to.
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
    @abstractmethod
    def stride(self) -> int:
        """Positions of the transformer for each frame of codes or latents."""

    @property
    def frame_samples(self) -> int:
        """Audio samples for each frame of codes or latents."""
        return self.stride * math.prod(self.upsampling_ratios)
