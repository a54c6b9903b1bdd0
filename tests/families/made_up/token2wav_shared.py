"""A made-up codec in one file: residual codebooks and the decoder of DAC, in a format of its own.

config.json          {"model_type": "made_up_codec", "codec": {...}, "language_model": {...}}
model.safetensors    codec.books.0.table ..., codec.generator.conv1.weight ...
"""

from __future__ import annotations

from dataclasses import dataclass

from token2wav.published.codec_config import SymmetricCodecConfig
from token2wav.published.codec_sizes import SymmetricCodecSizes
from token2wav.published.formats import Format
from token2wav.published.weight_names import Codebooks, WeightNames

MODEL_TYPES = ("made_up_codec",)
DECODER = "token2wav.networks.symmetric_codec:SymmetricCodec"

FORMAT = Format(
    section="codec",
    names={"n_codebooks": "books", "codebook_size": "entries", "sampling_rate": "/rate"},
    defaults={"encoder_hidden_size": 32},
    only={"activation": "snake"},
    without_effect=("loss_weight",),
)
WEIGHTS = WeightNames(
    parts=("codec.books.", "codec.generator."),
    unused=r"\.inward\.",  # makes codes
    renamed=((r"^codec\.", ""), (r"^generator\.", "decoder.")),
    codebooks=(
        Codebooks(r"books\.(\d{1,3})\.", "quantizer", ("table", "outward.weight", "outward.bias")),
    ),
)


@dataclass(frozen=True, kw_only=True)
class MadeUpConfig(SymmetricCodecConfig):
    """Configuration of the made-up codec."""

    withheld_frames_default: int = 4


read = MadeUpConfig.reader(SymmetricCodecSizes, FORMAT)
