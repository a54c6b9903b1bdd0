"""DAC, the codec of Zonos, Dia and Parler: residual codebooks, and symmetric convolutions with
Snake.

Its configuration is the `config.json` of a `transformers` folder, or a part of the `weights.pth` of
the package `descript-audio-codec`: a pickle of the weights (`state_dict`) and of
the arguments that made the model (`metadata.kwargs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from token2wav.config.values import prefixed
from token2wav.published.checkpoint_files import only_file, weights_file
from token2wav.published.codec_config import SymmetricCodecConfig
from token2wav.published.codec_sizes import SymmetricCodecSizes
from token2wav.published.formats import DESCRIPT_NAMES, TRANSFORMERS, Format
from token2wav.published.transformers_json import has_model_type
from token2wav.published.weight_names import Codebooks, WeightNames

MODEL_TYPES = ("dac",)
FILES = ("weights.pth", "weights_*khz*.pth")  # the second is what the package downloads and saves
DECODER = "token2wav.networks.symmetric_codec:SymmetricCodec"
WEIGHTS = WeightNames(
    parts=("quantizer.", "decoder."),
    codebooks=(Codebooks(r"quantizer\.quantizers\.(\d{1,3})\.", "quantizer"),),
    wrappers=("state_dict",),
)

_TRAINING = ("quantizer_dropout", "commitment_loss_weight", "codebook_loss_weight")
FORMAT = Format(without_effect=(*TRANSFORMERS, *_TRAINING, "hop_length"))
_DESCRIPT = Format(
    section="metadata.kwargs",
    names={**DESCRIPT_NAMES, "sampling_rate": "sample_rate"},
    defaults={"upsampling_ratios": [8, 8, 4, 2], "sampling_rate": 44100},
    without_effect=_TRAINING,
)

# A chunk of one token (12 ms at 44.1 kHz) would be too short to play, and would cost a step. So a
# block has the tokens of at least 40 ms: 4 tokens (46 ms) at 44.1 kHz, 3 at 24 kHz, 2 at 16 kHz.
_BLOCK_SECONDS = 0.04


@dataclass(frozen=True, kw_only=True)
class DacConfig(SymmetricCodecConfig):
    sizes: SymmetricCodecSizes
    # Frames that DAC models hold back. The last frame of a chunk then has an SNR of 52 dB or more
    # (docs/models.md).
    withheld_frames_default: int = 8

    @classmethod
    def of(cls, sizes: Any, **fields: Any) -> Any:
        block = math.ceil(_BLOCK_SECONDS * sizes.audio_rate / sizes.frame_samples)
        return super().of(sizes, block_tokens=block, **fields)


def read(folder: Path) -> DacConfig:
    if has_model_type(folder, *MODEL_TYPES):
        return DacConfig.reader(SymmetricCodecSizes, FORMAT)(folder)
    # Imported here, because it imports torch. Folders of `transformers` can be read without torch.
    from token2wav.networks.weights import read_state

    path = only_file(folder, FILES) or weights_file(folder, FILES[:1])
    metadata = {"metadata": read_state(path).get("metadata")}
    with prefixed(f"{path}: "):
        config: DacConfig = DacConfig.of(
            _DESCRIPT.read(SymmetricCodecSizes, metadata), weights=(path.name,)
        )
    return config
