"""WavTokenizer, the codec of OuteTTS: one code of a large codebook, attention, and Vocos.

Its configuration is the YAML file of its authors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from token2wav.config.strict_yaml import read_yaml
from token2wav.config.values import Bounds, prefixed
from token2wav.config.windows import ONE_PART, Windows
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.checkpoint_files import PUBLISHED, only_file
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import Format
from token2wav.published.relations import Equals, Multiple
from token2wav.published.weight_names import Codebooks, WeightNames
from token2wav.published.window_config import WindowCodecConfig

FILES = ("wavtokenizer*.yaml",)
_CHECKPOINTS = "*_v2.ckpt", "*.ckpt"  # in order of preference
DOWNLOADS = ("|".join(FILES), "*_v2.ckpt|*.ckpt")
DECODER = "token2wav.families.wavtokenizer.network:WavTokenizerDecoder"
WEIGHTS = WeightNames(
    parts=("feature_extractor.encodec.quantizer.", "backbone.", "head."),
    unused=r"istft\.window$|\.(inited|cluster_size|embed_avg)$",
    renamed=((r"^(?:backbone|head)\.", "vocos."),),
    codebooks=(
        Codebooks(
            r"feature_extractor\.encodec\.quantizer\.vq\.layers\.(\d{1,3})\._codebook\.",
            "quantizer",
            ("embed",),
        ),
    ),
    wrappers=("state_dict",),
)

_ENCODER, _BACKBONE, _HEAD = (
    f"{part}.init_args" for part in ("feature_extractor", "backbone", "head")
)
FORMAT = Format(
    section="model.init_args",
    names={
        "num_quantizers": f"{_ENCODER}.num_quantizers",
        "codebook_size": f"{_ENCODER}.vq_bins",
        "downsamples": f"{_ENCODER}.dowmsamples",
        "input_channels": f"{_BACKBONE}.input_channels",
        "dim": (f"{_BACKBONE}.dim", f"{_HEAD}.dim"),
        "intermediate_dim": f"{_BACKBONE}.intermediate_dim",
        "num_layers": f"{_BACKBONE}.num_layers",
        "adanorm_num_embeddings": f"{_BACKBONE}.adanorm_num_embeddings",
        "n_fft": f"{_HEAD}.n_fft",
        "hop_length": f"{_HEAD}.hop_length",
        "padding": f"{_HEAD}.padding",
    },
    only={
        "feature_extractor.class_path": "decoder.feature_extractors.EncodecFeatures",
        "backbone.class_path": "decoder.models.VocosBackbone",
        "head.class_path": "decoder.heads.ISTFTHead",
        f"{_ENCODER}.encodec_model": "encodec_24khz",
    },
    without_effect=(
        *("initial_learning_rate", "num_warmup_steps", "*_coeff", "pretrain_mel_steps"),
        *("evaluate_*", "resume", "resume_config", "resume_model"),
        *(f"{_ENCODER}.bandwidths", f"{_ENCODER}.train_codebooks", f"{_ENCODER}.vq_kmeans"),
        f"{_BACKBONE}.layer_scale_init_value",
    ),
)

_WINDOWS = Windows(20, left=40, right=10, overlap=1, part=ONE_PART.part)  # docs/exactness.md


@dataclass(frozen=True, kw_only=True)
class WavTokenizerSizes(CodecSizes):
    """Sizes of the decoder. Its authors' files have them in several sections.

    Attributes:
        downsamples: factors of the encoder. Their product is the number of samples for each code.
        input_channels: length of an entry of the codebook.
        dim, intermediate_dim, num_layers: channels of the blocks of Vocos, channels within a block,
            and the number of blocks.
        adanorm_num_embeddings: scales and shifts of each norm, one for each bandwidth of the
            encoder. The first is used.
    """

    RATE, FRAME = "sample_rate", ("hop_length",)

    num_quantizers: bounded.CodebookCount = 1
    codebook_size: bounded.CodebookSize = 16_384
    downsamples: bounded.SomeRates = (6, 5, 5, 4)
    input_channels: bounded.Width
    dim: Annotated[int, Bounds(64, 1 << 16), Multiple(32, "the groups of a norm")]
    intermediate_dim: bounded.Width
    num_layers: bounded.Layers
    adanorm_num_embeddings: Annotated[int, Bounds(1, 1024)]
    n_fft: bounded.FftSize
    hop_length: Annotated[bounded.HopSize, Equals("encoded_samples", "dowmsamples")]
    padding: Literal["same"] = "same"
    sample_rate: bounded.SampleRate = 24_000

    @property
    def encoded_samples(self) -> int:
        """Samples for each code in the encoder."""
        return math.prod(self.downsamples)


def read(folder: Path) -> WindowCodecConfig:
    path = only_file(folder, FILES)
    assert path is not None  # the folder was recognised by this file
    checkpoints = (only_file(folder, [pattern]) for pattern in _CHECKPOINTS)
    checkpoint = next((path.name for path in checkpoints if path), None)
    document = read_yaml(path)
    with prefixed(f"{path}: "):
        if not isinstance(document, dict):
            raise ConfigError(f"expected a mapping, got {type(document).__name__}")
        return WindowCodecConfig.of(
            FORMAT.read(WavTokenizerSizes, document),
            weights=(checkpoint, *PUBLISHED) if checkpoint else PUBLISHED,
            windows=_WINDOWS,
            whole=ONE_PART,
        )
