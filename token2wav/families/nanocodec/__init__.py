"""NanoCodec, the codec of NVIDIA Magpie and Kani TTS: groups of finite scalar quantisation, and a
causal HiFi-GAN as decoder.

Its configuration is read from `model_config.yaml` as data. The file describes the training too.
Only the sample rate, the decoder and the quantiser are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from token2wav.config.strict_yaml import parse_yaml, read_bounded
from token2wav.config.values import Bounds, prefixed
from token2wav.errors import ConfigError
from token2wav.published import bounded, nemo_archive
from token2wav.published.checkpoint_files import only_file
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import Format
from token2wav.published.nemo_archive import CONFIG, read_member
from token2wav.published.relations import Equals, Gives, Halves
from token2wav.published.weight_names import WeightNames

ARCHIVE = "*.nemo"
FILES = (ARCHIVE, CONFIG)
# Names of files with the weights in a folder without an archive, in order of preference.
WEIGHTS_FILES = ("model_weights.safetensors", "model.safetensors", nemo_archive.WEIGHTS)
DOWNLOADS = (f"*.nemo|{CONFIG}", "|".join(("*.nemo", *WEIGHTS_FILES)))
DECODER = "token2wav.families.nanocodec.network:NanoCodec"
WEIGHTS = WeightNames(
    parts=("audio_decoder.",),
    renamed=((r"^audio_decoder\.", ""), (r"\.conv\.", "."), (r"\.activation\.snake_act\.", ".")),
)

_SECTIONS = {
    "audio_decoder": "CausalHiFiGANDecoder",
    "vector_quantizer": "GroupFiniteScalarQuantizer",
}
_QUANTIZER = ("num_groups", "num_levels_per_group")
_TOP = ("sample_rate", "samples_per_frame")


@dataclass(frozen=True, kw_only=True)
class NanoCodecSizes(CodecSizes):
    """Sizes of the decoder, a causal HiFi-GAN, and of the quantiser. Fields have the published
    names.

    Attributes:
        num_groups: codes of a frame.
        num_levels_per_group: levels of every value of a group.
        input_dim: channels of the dequantised codes.
        base_channels: channels of the first convolution; every upsampling halves them.
        resblock_kernel_sizes, resblock_dilation_sizes: kernels of the parallel residual blocks, and
            dilations of the convolutions in each block.
        n_groups_equal_to_out_channels: whether every output channel of an upsampling reads its own
            input channels only.
    """

    RATE, CODES = "sample_rate", ("num_groups", "codebook_size")
    FRAME = ("up_sample_rates",)

    sample_rate: bounded.SampleRate
    samples_per_frame: Annotated[
        int | None, Bounds(1, 1 << 20), Equals("frame_samples", "up_sample_rates")
    ] = None
    num_groups: Annotated[int, Bounds(1, 64)]
    num_levels_per_group: Annotated[bounded.Levels, Gives("codebook_size", 1 << 20, "codes")]
    input_dim: Annotated[
        bounded.Width, Equals("code_values", "num_groups and num_levels_per_group")
    ]
    up_sample_rates: bounded.SomeRates = (8, 8, 2, 2)
    base_channels: Annotated[bounded.Width, Halves("up_sample_rates")] = 512
    in_kernel_size: bounded.Kernel = 7
    out_kernel_size: bounded.Kernel = 3
    resblock_kernel_sizes: bounded.SomeKernels = (3, 7, 11)
    resblock_dilation_sizes: bounded.BlockDilations = (1, 3, 5)
    activation: Literal["half_snake"] = "half_snake"
    output_activation: Literal["tanh", "clamp"] = "tanh"
    pad_mode: Literal["zeros"] = "zeros"
    n_groups_equal_to_out_channels: bool = True

    @property
    def codebook_size(self) -> int:
        """Values of a code."""
        return math.prod(self.num_levels_per_group)

    @property
    def code_values(self) -> int:
        """Values of a frame of codes."""
        return self.num_groups * len(self.num_levels_per_group)


_DECODER = set(NanoCodecSizes.__dataclass_fields__) - {*_QUANTIZER, *_TOP}
FORMAT = Format(
    names={
        **{name: f"vector_quantizer.{name}" for name in _QUANTIZER},
        **{name: f"audio_decoder.{name}" for name in sorted(_DECODER)},
    },
    without_effect=tuple(f"{section}._target_" for section in _SECTIONS),
)


def read(folder: Path) -> CodecConfig:
    """Reads the configuration of a folder with a `.nemo` archive, or with its unpacked files."""
    archive = only_file(folder, (ARCHIVE,))
    path = archive or folder / CONFIG
    content = read_member(archive, CONFIG).getvalue() if archive else read_bounded(path)
    with prefixed(f"{path}: "):
        document = parse_yaml(content)
        if not isinstance(document, dict):
            raise ConfigError(f"expected a mapping, got {type(document).__name__}")
        for name, kind in _SECTIONS.items():
            section = document.get(name)
            target = section.get("_target_") if isinstance(section, dict) else None
            if not isinstance(target, str) or target.rpartition(".")[2] != kind:
                raise ConfigError(
                    f"{name}._target_: {target!r:.80} is not supported; expected {kind}"
                )
        # The other keys belong to encoder, discriminator and training.
        values: dict[str, Any] = {
            key: value for key, value in document.items() if key in {*_SECTIONS, *_TOP}
        }
        return CodecConfig.of(
            FORMAT.read(NanoCodecSizes, values),
            weights=(archive.name,) if archive else WEIGHTS_FILES,
        )
