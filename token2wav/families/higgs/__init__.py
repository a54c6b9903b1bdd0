"""Higgs Audio tokenizer v2, the codec of Higgs Audio v2 and v3 and of OmniVoice: residual codebooks
with projections, and the decoder of DAC.

Its configuration is the `config.json` of a `transformers` folder, or of the first release, which
the package `boson-multimodal` reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from token2wav.config.values import Bounds, Length, convert, prefixed
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.codec_config import SymmetricCodecConfig
from token2wav.published.codec_sizes import CodecSizes, SymmetricSizes
from token2wav.published.formats import TRANSFORMERS, Format
from token2wav.published.relations import Halves, SameProduct
from token2wav.published.transformers_json import has_model_type
from token2wav.published.weight_names import Codebooks, WeightNames

MODEL_TYPES = ("higgs_audio_v2_tokenizer",)
CONFIG_KEYS = ("n_q", "bins", "ratios")  # of the first release
WEIGHT_PREFIXES = ("quantizer.quantizers.", "fc2.", "acoustic_decoder.")
DECODER = "token2wav.families.higgs.network:Higgs"
WEIGHTS = WeightNames(
    parts=("quantizer.", "fc2.", "acoustic_decoder.", "fc_post2.", "decoder_2."),
    unused=r"^quantizer\..*(?<!codebook\.embed)(?<!project_out\.weight)(?<!project_out\.bias)$",
    renamed=(  # names in the `model.pth` of the first release
        (r"^quantizer\.vq\.layers\.(\d+)\._?", r"quantizer.quantizers.\1."),
        (r"^fc_post2\.", "fc2."),
        (r"^decoder_2\.", "acoustic_decoder."),
    ),
    codebooks=(
        Codebooks(
            r"quantizer\.quantizers\.(\d{1,3})\.",
            "quantizer",
            ("codebook.embed", "project_out.weight", "project_out.bias"),
        ),
    ),
)

_ACOUSTIC = "acoustic_model_config"
_DECODER_SIZES = (
    *("encoder_hidden_size", "downsampling_ratios", "decoder_hidden_size", "hidden_size"),
    "upsampling_ratios",
)
_DAC_CODEBOOKS = (
    *("n_codebooks", "codebook_size", "codebook_dim", "quantizer_dropout", "sampling_rate"),
    *("commitment_loss_weight", "codebook_loss_weight", "hop_length"),
)
FORMAT = Format(
    names={
        **{name: f"{_ACOUSTIC}.{name}" for name in _DECODER_SIZES},
        **dict.fromkeys(("n_q", "vq_scale"), ()),
        "semantic_width": "semantic_model_config.hidden_size",
    },
    without_effect=(
        *(*TRANSFORMERS, "kernel_size", "channel_ratios", "strides", "block_dilations"),
        *("unit_kernel_size", "semantic_sample_rate", "downsample_factor"),
        *(f"{_ACOUSTIC}.{key}" for key in (*TRANSFORMERS, *_DAC_CODEBOOKS)),
        "semantic_model_config.*",
    ),
)
FIRST = Format(
    names={
        "downsampling_ratios": "ratios",
        "upsampling_ratios": "ratios",
        "hidden_size": "D",
        "codebook_size": "bins",
        **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "semantic_width"), ()),
    },
    defaults={"hidden_size": 128, "codebook_dim": None, "sample_rate": 16000, "n_q": 8},
    without_effect=(
        *("n_filters", "causal", "normalize", "audio_normalize", "segment", "semantic_techer"),
        *("last_layer_semantic", "merge_mode", "downsample_mode", "name", "semantic_sample_rate"),
        *("quantizer_type", "device", "architectures", "model_type"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class HiggsSizes(SymmetricSizes, CodecSizes):
    """Sizes of a Higgs Audio tokenizer, with the defaults that `transformers` publishes.

    Attributes:
        target_bandwidths: kilobits per second; the last value gives the number of codebooks.
        n_q: number of codebooks, only in the first release.
        semantic_width: channels of HuBERT.
        vq_scale: factor by which the codebooks have fewer channels than the encoders, only in the
            first release.
    """

    RATE = "sample_rate"
    CODES, FEWER_CODES = ("codebooks", "codebook_size"), True

    downsampling_ratios: bounded.SomeRates = (8, 5, 4, 2)
    upsampling_ratios: Annotated[bounded.Rates, SameProduct("downsampling_ratios")] = (8, 5, 4, 2)
    decoder_hidden_size: Annotated[bounded.Width, Halves("rates")] = 1024
    hidden_size: bounded.OptionalWidth = 256
    sample_rate: bounded.SampleRate = 24000
    target_bandwidths: Annotated[
        tuple[Annotated[float, Bounds(0.001, 1000)], ...], Length(16, least=1)
    ] = (0.5, 1, 1.5, 2)
    n_q: Annotated[int | None, Bounds(1, 64)] = None
    codebook_size: Annotated[int, Bounds(2, 1 << 20)] = 1024
    codebook_dim: bounded.OptionalWidth = 64
    semantic_width: bounded.Width = 768
    vq_scale: bounded.Width = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        with prefixed("target_bandwidths: "):
            # checks its range
            convert(self.codebooks, bounded.CodebookCount, "number of codebooks")
        if self.codebook_dim is None:
            raise ConfigError("codebook_dim: missing; codebooks need projections")
        if not self.quantizer_width:
            width = self.latents + self.semantic_width
            raise ConfigError(f"vq_scale: {self.vq_scale} leaves no channel of {width}")

    @property
    def codebooks(self) -> int:
        bits = math.ceil(math.log2(self.codebook_size))
        frames = math.ceil(self.frames_per_second)
        return self.n_q or int(1000 * self.target_bandwidths[-1] // (frames * bits))

    @property
    def quantizer_width(self) -> int:
        """Channels of the sum of the codebooks."""
        return (self.latents + self.semantic_width) // self.vq_scale


@dataclass(frozen=True, kw_only=True)
class HiggsConfig(SymmetricCodecConfig):
    # Frames of 40 ms that are held back. The decoder reads 394 ms ahead. The last frame of a chunk
    # has an SNR of 52 dB (docs/models.md).
    withheld_frames_default: int = 7


_read = HiggsConfig.reader(HiggsSizes, FORMAT)
_read_first = HiggsConfig.reader(HiggsSizes, FIRST, weights=("model.pth",))


def read(folder: Path) -> HiggsConfig:
    return (_read if has_model_type(folder, *MODEL_TYPES) else _read_first)(folder)
