"""EAR-TTS, the codec of Nemotron VoiceChat: ConvNeXt blocks and an inverse STFT.

Its configuration is a section of the `config.json` of a NeMo model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import Format
from token2wav.published.relations import AsLong, Equals
from token2wav.published.weight_names import Codebooks, WeightNames

CONFIG_KEYS = ("data", "model")
FORMAT = Format(
    section="model.speech_generation.model.codec_config",
    names={"sample_rate": "/model.speech_generation.data.target_sample_rate"},
)
PREFIX = "tts_model.audio_codec."  # beginning of the names of the weights
WEIGHT_PREFIXES = (PREFIX,)
DECODER = "token2wav.families.ear_tts.network:EarTtsDecoder"
WEIGHTS = WeightNames(
    parts=(f"{PREFIX}prvq.mus_list.", f"{PREFIX}decoder."),
    renamed=(
        (rf"^{PREFIX}(decoder\.)?", ""),
        (r"^(prvq\.mus_list\.\d+)$", r"\1.entries"),
    ),
    codebooks=(Codebooks(r"prvq\.mus_list\.(\d{1,3})\.", "codebooks", ("entries",)),),
)


@dataclass(frozen=True, kw_only=True)
class EarTtsSizes(CodecSizes):
    """Sizes of the codec. The fields have the names of the published configuration.

    Attributes:
        channel_mult, rates: factors of channels and of upsampling, in the order of the encoder.
    """

    RATE, FRAME = "sample_rate", ("rates", "hop_length")

    latent_size: bounded.Width  # channels of the sum of codebook entries
    n_fft: bounded.SmallFftSize
    hop_length: bounded.HopSize
    # channels of the decoder's last stage; `channel_mult` multiplies them
    base_hidden_size: bounded.Width
    channel_mult: Annotated[bounded.Rates, AsLong("rates")]
    rates: bounded.SomeRates
    num_blocks: bounded.Layers
    kernel_size: bounded.Kernel
    groups: bounded.Width = 1
    codebook_size: bounded.CodebookSize
    num_quantizers: bounded.CodebookCount
    wav_to_token_ratio: Annotated[
        bounded.FrameSamples, Equals("frame_samples", "rates and hop_length")
    ]
    sample_rate: bounded.SampleRate = 22_050

    def __post_init__(self) -> None:
        super().__post_init__()
        for width in (self.latent_size, *self.widths):
            if width > 1 << 16 or width % self.groups:
                raise ConfigError(
                    f"groups: {self.groups} does not divide {width} channels, or there are more "
                    f"than {1 << 16}"
                )

    @property
    def widths(self) -> list[int]:
        """Channels of each stage of the decoder."""
        return [self.base_hidden_size * factor for factor in reversed(self.channel_mult)]


read = CodecConfig.reader(EarTtsSizes, FORMAT)
