"""MOSS Audio Tokenizer, the codec of MOSS-TTS, MOSS-TTSD and MOSS-TTS-Realtime: residual codebooks,
and causal transformers with patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds, Length, check_bounds
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import TRANSFORMERS, Format
from token2wav.published.relations import Multiple, Only
from token2wav.published.weight_names import MOSHI_LAYERS, Codebooks, WeightNames

MODEL_TYPES = ("moss-audio-tokenizer",)
FORMAT = Format(
    names={
        "sampling_rate": ("sampling_rate", "sample_rate"),
        "number_channels": ("number_channels", "channels_numbers"),  # the second is older
    },
    without_effect=(
        *(*TRANSFORMERS, "version", "encoder_kwargs", "quantizer_type", "attention_backend"),
        *("compute_dtype", "codec_weight_dtype", "codec_compute_dtype", "codec_load_dtype"),
        "reversed_decoder_kwargs",
    ),
)
DECODER = "token2wav.families.moss.network:Moss"
WEIGHTS = WeightNames(
    parts=("quantizer.", "decoder."),
    unused=r"^quantizer\.(quantizers\.\d+\.in_proj|input_proj)\.",  # make codes
    renamed=((r"^quantizer\.output_proj\.", "output_proj."), *MOSHI_LAYERS),
    codebooks=(Codebooks(r"quantizer\.quantizers\.(\d{1,3})\.", "quantizer"),),
)

_PARTS = "decoder_kwargs"


@dataclass(frozen=True, kw_only=True)
class QuantizerSizes:
    """Sizes of the codebooks. All kinds of codebooks (`quantizer_type`) have the same decoder."""

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        *("quantizer_type", "quantizer_dropout", "commitment", "decay", "epsilon", "threshold_ema"),
        *("kmeans_init", "kmeans_iters", "commitment_loss_weight", "codebook_loss_weight"),
    )

    input_dim: bounded.Width = 768  # channels of the encoder's output
    # channels of the sum of the codebooks; None for `input_dim`
    rvq_dim: bounded.OptionalWidth = 512
    output_dim: bounded.OptionalWidth = 768  # channels of the latents; None for `input_dim`
    num_quantizers: bounded.CodebookCount = 32
    codebook_size: bounded.CodebookSize = 1024
    codebook_dim: bounded.Width = 8

    def __post_init__(self) -> None:
        check_bounds(self, "")

    @property
    def width(self) -> int:
        """Channels of the sum of the codebooks."""
        return self.rvq_dim or self.input_dim

    @property
    def latents(self) -> int:
        """Channels of the latents."""
        return self.output_dim or self.input_dim


@dataclass(frozen=True, kw_only=True)
class TransformerPart:
    """Part of the decoder that is a transformer.

    Attributes:
        d_model, dim_feedforward: channels inside.
        context_duration: seconds that a position attends to; None for the value of the model.
        layer_scale: first value of the scales in the training. A part has scales.
    """

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("conv_layout",)

    module_type: Literal["Transformer"] = "Transformer"
    input_dimension: bounded.Width
    output_dimension: bounded.Width
    d_model: Annotated[
        bounded.Width, Multiple("pairs", "twice num_heads; rotary positions need pairs")
    ]
    dim_feedforward: bounded.Width
    num_heads: bounded.Heads
    num_layers: bounded.Layers
    max_period: bounded.RopeBase = 10_000.0
    context_duration: Annotated[float | None, Bounds(0.001, 10_000)] = None
    layer_scale: Annotated[float, Bounds(-1e9, 1e9)]
    causal: Annotated[bool, Only(True)] = True
    norm: Literal["layer_norm"] = "layer_norm"
    positional_embedding: Literal["rope"] = "rope"
    gating: Literal["none"] = "none"

    def __post_init__(self) -> None:
        check_bounds(self, "")

    @property
    def pairs(self) -> int:
        return 2 * self.num_heads


@dataclass(frozen=True, kw_only=True)
class PatchPart:
    """Part of the decoder that turns channels into `patch_size` times as many positions."""

    module_type: Literal["PatchedPretransform"] = "PatchedPretransform"
    patch_size: bounded.Rate

    def __post_init__(self) -> None:
        check_bounds(self, "")


Part = TransformerPart | PatchPart


@dataclass(frozen=True, kw_only=True)
class MossSizes(CodecSizes):
    """Sizes of the decoder.

    Attributes:
        number_channels: channels of the audio: 1, or 2 in version 2 of the codec. The decoder makes
            the samples of two channels in turn. None for 1.
        causal_transformer_context_duration: seconds that a position of a transformer attends to.
        decoder_kwargs: parts of the decoder, in their order; None for the published ones.
    """

    FRAME = ("downsample_rate",)

    sampling_rate: bounded.SampleRate = 24_000
    downsample_rate: bounded.FrameSamples = 1920
    number_channels: Annotated[int | None, Bounds(1, 2)] = None
    enable_channel_interleave: bool | None = None
    causal_transformer_context_duration: Annotated[float, Bounds(0.001, 10_000)] = 10.0
    quantizer_kwargs: QuantizerSizes | None = None
    decoder_kwargs: Annotated[tuple[Part, ...] | None, Length(64, least=1)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels > 1 and self.enable_channel_interleave is False:
            raise ConfigError(
                "enable_channel_interleave: expected true; only decoders that make the samples of "
                "the channels in turn are supported"
            )
        channels, samples = self.quantizer.latents, 1
        for index, part in enumerate(self.parts):
            if isinstance(part, TransformerPart):
                if part.input_dimension != channels:
                    raise ConfigError(
                        f"{_PARTS}[{index}].input_dimension: {part.input_dimension}, but the part "
                        f"before it has {channels} channels"
                    )
                channels = part.output_dimension
            else:
                if channels % part.patch_size:
                    raise ConfigError(
                        f"{_PARTS}[{index}].patch_size: {part.patch_size} does not divide "
                        f"{channels} channels"
                    )
                channels, samples = channels // part.patch_size, samples * part.patch_size
        if channels != 1:
            raise ConfigError(f"{_PARTS}: the last part has {channels} channels, expected 1")
        if samples != self.channels * self.downsample_rate:
            raise ConfigError(
                f"downsample_rate: {self.downsample_rate}, but the patches have "
                f"{samples / self.channels:g} samples of each channel for a frame"
            )
        for index, window in self.windows():
            if not 2 <= window <= 1 << 16:
                raise ConfigError(
                    f"{_PARTS}[{index}]: a window of {window} positions; 2 to 65536 are allowed"
                )

    @property
    def tokens(self) -> TokenFormat:
        codes = self.quantizer
        return TokenFormat.codes(codes.num_quantizers, codes.codebook_size, fewer=True)

    @property
    def channels(self) -> int:
        return self.number_channels or 1

    @property
    def quantizer(self) -> QuantizerSizes:
        return self.quantizer_kwargs or QuantizerSizes()

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.decoder_kwargs or _PUBLISHED

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yields the index of each transformer, and the number of positions that a position attends
        to, itself included.
        """
        rate = self.sampling_rate / self.downsample_rate
        seconds = self.causal_transformer_context_duration
        for index, part in enumerate(self.parts):
            if isinstance(part, TransformerPart):
                yield index, round(rate * (part.context_duration or seconds))
            else:
                rate *= part.patch_size


def _transformer(inputs: int, outputs: int, width: int, layers: int, heads: int) -> Part:
    return TransformerPart(
        input_dimension=inputs,
        output_dimension=outputs,
        d_model=width,
        dim_feedforward=4 * width,
        num_heads=heads,
        num_layers=layers,
        layer_scale=0.01,
    )


_PUBLISHED = (
    _transformer(768, 1280, 1280, 32, 20),
    PatchPart(patch_size=2),
    _transformer(640, 768, 768, 12, 12),
    PatchPart(patch_size=2),
    _transformer(384, 768, 768, 12, 12),
    PatchPart(patch_size=2),
    _transformer(384, 240, 768, 12, 12),
    PatchPart(patch_size=240),
)


@dataclass(frozen=True, kw_only=True)
class MossConfig(CodecConfig):
    sizes: MossSizes

    @property
    def channels(self) -> int:
        return self.sizes.channels


read = MossConfig.reader(MossSizes, FORMAT)
