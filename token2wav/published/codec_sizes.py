"""Sizes of the decoders that several codecs share. The module does not import torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, check_bounds, convert
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.relations import Divides, Equals, Even, Gives, Halves, Only, SameProduct


class CodecSizes:
    """Sizes of a codec. A codec derives a dataclass. The annotations of its fields have bounds and
    relations.

    In published files, `codebook_size` and `codebook_dim` are the entries of a codebook and their
    length, `sliding_window` the positions that a position attends to, `n_fft` and `hop_length` the
    samples of a window of an inverse STFT and the samples from a window to the next one.

    Attributes:
        RATE: field with the samples of audio per second.
        CODES: fields with the number of codes of a token and with the entries of a codebook.
        FEWER_CODES: whether a stream may have fewer codes in each token.
        LATENT: field with the length of a latent, for a decoder of latents; else empty.
        FRAME: fields and properties. Each is a number or a list of factors, and their product is
            the number of samples of a frame.
    """

    RATE: ClassVar[str] = "sampling_rate"
    CODES: ClassVar[tuple[str, str]] = ("num_quantizers", "codebook_size")
    FEWER_CODES: ClassVar[bool] = False
    LATENT: ClassVar[str] = ""
    FRAME: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_bounds(self, "")

    @property
    def tokens(self) -> TokenFormat:
        if self.LATENT:
            return TokenFormat.latents(getattr(self, self.LATENT))
        count, size = (getattr(self, name) for name in self.CODES)
        return TokenFormat.codes(count, size, fewer=self.FEWER_CODES)

    @property
    def audio_rate(self) -> int:
        """Samples of audio per second."""
        return int(getattr(self, self.RATE))

    @property
    def frame_samples(self) -> int:
        """Samples of each channel for each frame of codes or latents."""
        if not self.FRAME:
            raise RuntimeError(
                f"{type(self).__name__}: FRAME must name the fields whose product is the number of "
                "samples of a frame"
            )
        parts = (getattr(self, name) for name in self.FRAME)
        return math.prod(math.prod(part) if isinstance(part, tuple) else part for part in parts)

    @property
    def frames_per_second(self) -> float:
        """Frames of codes or latents per second."""
        rate = self.audio_rate / self.frame_samples
        return float(convert(rate, bounded.CodeRate, "frames per second"))


@dataclass(frozen=True, kw_only=True)
class SymmetricSizes:
    """Sizes of a symmetric decoder. DAC has the same fields and defaults in `transformers`.

    Attributes:
        encoder_hidden_size: channels of the encoder before its first downsampling.
        decoder_hidden_size: channels of the decoder before its first upsampling. Every upsampling
            halves them.
        hidden_size: channels of the latents; None for the channels of the encoder's output.
        upsampling_ratios: factor of each upsampling; empty for the reversed factors of the encoder.
    """

    encoder_hidden_size: Annotated[
        bounded.Width, Gives("latents", 1 << 16, "channels of the latents")
    ] = 64
    downsampling_ratios: bounded.SomeRates = (2, 4, 8, 8)
    decoder_hidden_size: Annotated[bounded.Width, Halves("rates")] = 1536
    hidden_size: bounded.OptionalWidth = None
    upsampling_ratios: Annotated[bounded.Rates, SameProduct("downsampling_ratios")] = ()

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

    @property
    def rates(self) -> tuple[int, ...]:
        """Factor of each upsampling."""
        return self.upsampling_ratios or self.downsampling_ratios[::-1]

    @property
    def latents(self) -> int:
        return self.hidden_size or self.encoder_hidden_size << len(self.downsampling_ratios)

    @property
    def frame_samples(self) -> int:
        """Audio samples for each frame of codes."""
        return math.prod(self.rates)


@dataclass(frozen=True, kw_only=True)
class SymmetricCodecSizes(SymmetricSizes, CodecSizes):
    """Sizes of codebooks and a symmetric decoder. DAC has the same fields and defaults in
    `transformers`.
    """

    CODES = ("n_codebooks", "codebook_size")
    FEWER_CODES = True

    sampling_rate: bounded.SampleRate = 16000
    n_codebooks: bounded.CodebookCount = 9
    codebook_size: bounded.CodebookSize = 1024
    codebook_dim: bounded.Width = 8


@dataclass(frozen=True)
class SeanetSizes(CodecSizes, ABC):
    """Sizes for a transformer and a SEANet decoder. Mimi has the same fields and defaults in
    `transformers`.

    Attributes:
        use_causal_conv, pad_mode, trim_right_ratio, use_conv_shortcut, attention_bias: variants, of
            which only the published one is supported.
        upsample_groups: groups of the upsampling before the transformer.
    """

    FRAME = ("stride", "upsampling_ratios")

    sampling_rate: bounded.SampleRate = 24000
    audio_channels: Annotated[int, Bounds(1, 1)] = 1
    hidden_size: bounded.Width = 512
    num_filters: bounded.Width = 64  # channels before the last convolution
    num_residual_layers: bounded.Layers = 1
    upsampling_ratios: bounded.SomeRates = (8, 6, 5, 4)
    kernel_size: bounded.Kernel = 7
    last_kernel_size: bounded.Kernel = 3
    residual_kernel_size: bounded.Kernel = 3
    # factor from the dilation of a residual unit to the next one
    dilation_growth_rate: bounded.Dilation = 2
    use_causal_conv: Annotated[bool, Only(True)] = True
    pad_mode: Literal["constant"] = "constant"
    compress: bounded.Rate = 2  # factor by which a residual unit has fewer channels inside
    trim_right_ratio: Annotated[float, Bounds(1, 1)] = 1.0
    use_conv_shortcut: Annotated[bool, Only(False)] = False
    upsample_groups: Annotated[bounded.Width, Divides("hidden_size")] = 512
    num_hidden_layers: bounded.Layers = 8
    intermediate_size: bounded.Width = 2048
    num_attention_heads: bounded.Heads = 8
    num_key_value_heads: Annotated[bounded.Heads, Equals("num_attention_heads")] = 8
    head_dim: bounded.OptionalWidth = None
    hidden_act: Literal["gelu", "gelu_pytorch_tanh"] = "gelu"
    norm_eps: bounded.Epsilon = 1e-5
    rope_theta: bounded.RopeBase = 10000.0
    sliding_window: bounded.Window = 250
    attention_bias: Annotated[bool, Only(False)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        growth, layers = self.dilation_growth_rate, self.num_residual_layers
        if growth ** (layers - 1) > bounded.LONGEST_DILATION:
            raise ConfigError(
                f"dilation_growth_rate: {growth} gives a dilation above "
                f"{bounded.LONGEST_DILATION} in residual layer {layers}"
            )
        Even(bounded.PAIRS).check_in(self, self.dim_head, "head_dim")

    @property
    def dim_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    @abstractmethod
    def stride(self) -> int:
        """Positions of the transformer for each frame of codes or latents."""
