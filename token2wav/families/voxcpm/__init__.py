"""The AudioVAE of VoxCPM: the decoder of DAC with causal convolutions, for continuous latents.

Its configuration is a section of the `config.json` of VoxCPM2, or of VoxCPM 0.5B and 1.5, whose
AudioVAE is older.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from token2wav.config.values import Bounds, Length, convert
from token2wav.published import bounded
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes, SymmetricSizes
from token2wav.published.formats import Format
from token2wav.published.relations import Ascending, Equals, Halves, Only
from token2wav.published.weight_names import WeightNames

FILES = ("audiovae.safetensors", "audiovae.pth")  # in order of preference
_SECTION = "audio_vae_config"  # missing in VoxCPM 0.5B
CONFIG_KEYS = (_SECTION,)
# The last is the width of a variant of the scales, which is not published.
_UNUSED = ("encoder_dim", "chunk_size", "decode_chunk_size", "cond_dim")
_OLDER = ("out_sample_rate", "sr_bin_boundaries")  # layers for a sample rate
FORMATS = {
    "voxcpm2": Format(section=_SECTION, optional=True, without_effect=_UNUSED),
    # The older AudioVAE has other defaults.
    "voxcpm": Format(
        section=_SECTION,
        optional=True,
        names=dict.fromkeys(_OLDER, ()),
        defaults={
            **dict.fromkeys(_OLDER),
            "decoder_dim": 1536,
            "decoder_rates": [8, 8, 5, 2],
        },
        without_effect=(*_UNUSED, *_OLDER),
    ),
}
DOWNLOADS = ("config.json", "|".join(FILES))
WEIGHTS = WeightNames(
    parts=("decoder.",),
    renamed=(  # scale and bias of each range of sample rates, before a layer of the decoder
        (r"sr_cond_model\.(\d{1,2})\.scale_embed\.weight$", r"model.\1.scale.weight"),
        (r"sr_cond_model\.(\d{1,2})\.bias_embed\.weight$", r"model.\1.scale.bias"),
    ),
    wrappers=("state_dict",),
)
Boundaries = Annotated[tuple[bounded.SampleRate, ...] | None, Length(64), Ascending()]


@dataclass(frozen=True)
class VoxCPMSizes(CodecSizes):
    """Sizes of the decoder. Fields and defaults come from VoxCPM2.

    Attributes:
        encoder_rates, sample_rate: factors and sample rate of the encoder, which give the number of
            latents per second.
        decoder_dim: channels before the first upsampling. Every upsampling halves them.
        depthwise: whether the convolutions filter every channel by itself.
        out_sample_rate: samples per second of the audio; None for `sample_rate`.
        sr_bin_boundaries: boundaries between ranges of sample rates, in ascending order. Each range
            has a scale and a bias of all channels before every upsampling. None for a decoder
            without them.
        cond_type: its two values differ in training only.
    """

    LATENT, FRAME = "latent_dim", ("decoder_rates",)

    encoder_rates: bounded.SomeRates = (2, 5, 8, 8)
    sample_rate: bounded.SampleRate = 16_000
    latent_dim: bounded.Width = 64
    decoder_dim: Annotated[bounded.Width, Halves("decoder_rates")] = 2048
    decoder_rates: bounded.SomeRates = (8, 6, 5, 2, 2, 2)
    depthwise: bool = True
    out_sample_rate: Annotated[int | None, Bounds(1, 768_000)] = 48_000
    sr_bin_boundaries: Boundaries = (20_000, 30_000, 40_000)
    use_noise_block: Annotated[bool, Only(False)] = False
    cond_type: Literal["scale_bias", "scale_bias_init"] = "scale_bias"
    cond_out_layer: Annotated[bool, Only(False)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        source = "sample_rate, encoder_rates and decoder_rates"
        Equals("decoder_rate", source).check_in(self, self.audio_rate, "out_sample_rate")

    @property
    def decoder_rate(self) -> float:
        """Samples per second that the decoder makes of the latents of the encoder."""
        return self.sample_rate * self.frame_samples / math.prod(self.encoder_rates)

    @property
    def audio_rate(self) -> int:
        """Samples per second of the audio."""
        return self.out_sample_rate or self.sample_rate

    @property
    def rate_range(self) -> int:
        """Index of the range that contains the sample rate of the audio."""
        return bisect_left(self.sr_bin_boundaries or (), self.audio_rate)

    @property
    def decoder(self) -> SymmetricSizes:
        return SymmetricSizes.of_decoder(self.decoder_rates, self.decoder_dim, self.latent_dim)


def _format(document: dict[str, Any]) -> Format:
    name = str(document.get("architecture", "voxcpm")).lower()
    return FORMATS[convert(name, Literal["voxcpm", "voxcpm2"], "architecture")]


# The longest hop has 1.28 s.
read = CodecConfig.reader(VoxCPMSizes, _format, weights=FILES, hop_blocks=(1, 32))
