"""NeuCodec and X-Codec 2, the codecs of NeuTTS and Llasa: one code of finite scalar quantisation, a
transformer that is not causal, and an inverse STFT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from token2wav.config.values import Bounds
from token2wav.config.windows import ONE_PART, Windows
from token2wav.published import bounded
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import ROPE_TYPES, TRANSFORMERS, Format
from token2wav.published.relations import Divides, Equals, Even, Gives, Multiple, Only
from token2wav.published.weight_names import WeightNames
from token2wav.published.window_config import WindowCodecConfig

DECODER = "token2wav.families.neucodec.network:NeuCodecDecoder"
WEIGHTS = WeightNames(
    parts=("quantizer.project_out.", "acoustic_decoder."),
    unused="^$",
    renamed=(
        (r"^quantizer\.", ""),
        (r"^acoustic_decoder\.", ""),
        (r"^head\.linear\.", "head."),
    ),
)

# The public code rotates queries and keys of a head by one angle for all positions, which changes
# no product of the two. So the rotary positions have no effect.
_UNUSED = (
    *(*TRANSFORMERS, "rope_theta", "rope_parameters.rope_theta", "pad_token_id"),
    *("encoder_hidden_size", "semantic_model_config", "activation_dropout"),
)
_ONE_RATE = ("input_sampling_rate", "output_sampling_rate")
FORMATS = {
    "neucodec": Format(without_effect=_UNUSED, only=ROPE_TYPES),
    "xcodec2": Format(
        names=dict.fromkeys(_ONE_RATE, "sampling_rate"),
        defaults=dict.fromkeys(_ONE_RATE, 16_000),
        without_effect=_UNUSED,
        only=ROPE_TYPES,
    ),
}
MODEL_TYPES = tuple(FORMATS)

_WINDOWS = Windows(25, left=50, right=5, overlap=1, part=ONE_PART.part)  # of the package of NeuTTS

_HOP = "the samples of a code have halves"
# The inverse STFT has tensors of 16 times the square of this number.
_MOST_FRAME_SAMPLES = 2048


@dataclass(frozen=True, kw_only=True)
class NeuCodecSizes(CodecSizes):
    """Sizes of the decoder. Fields and defaults are those of NeuCodec in `transformers`.

    Attributes:
        quantization_levels, quantization_dim: levels of each value of a code, and channels of their
            projection.
        downsampling_ratios: factors of the encoder. Their product is the number of samples for each
            code at `input_sampling_rate`; the audio has `output_sampling_rate`.
    """

    RATE, CODES = "output_sampling_rate", ("num_codebooks", "codebook_size")

    hidden_size: Annotated[bounded.Width, Multiple(32, "the groups of a norm")] = 1024
    intermediate_size: bounded.Width = 4096
    num_hidden_layers: bounded.Layers = 12
    num_attention_heads: bounded.Heads = 16
    num_key_value_heads: Annotated[int, Bounds(1, 256), Equals("num_attention_heads")] = 16
    head_dim: bounded.Width = 64
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: bounded.Epsilon = 1e-6
    attention_bias: Annotated[bool, Only(False)] = False
    quantization_dim: bounded.Width = 2048
    quantization_levels: Annotated[bounded.Levels, Gives("codebook_size", 1 << 20, "codes")] = (
        4,
    ) * 8
    input_sampling_rate: Annotated[bounded.SampleRate, Divides("input_samples")] = 16_000
    output_sampling_rate: bounded.SampleRate = 24_000
    downsampling_ratios: Annotated[
        bounded.SomeRates, Gives("frame_samples", _MOST_FRAME_SAMPLES, "samples of a code")
    ] = (2, 2, 4, 4, 5)

    @property
    def num_codebooks(self) -> int:
        return 1

    @property
    def codebook_size(self) -> int:
        """Values of a code."""
        return math.prod(self.quantization_levels)

    @property
    def input_samples(self) -> int:
        """Samples of a code, times the sample rate of the encoder."""
        return math.prod(self.downsampling_ratios) * self.output_sampling_rate

    @property
    def frame_samples(self) -> int:
        samples = self.input_samples // self.input_sampling_rate
        Even(_HOP).check_in(self, samples, "downsampling_ratios")
        return samples


read = WindowCodecConfig.reader(NeuCodecSizes, FORMATS, windows=_WINDOWS, whole=ONE_PART)
