"""The codec of Pocket TTS: the decoder of Mimi without codebooks, for continuous latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from token2wav.config.values import Bounds
from token2wav.published import bounded
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import SeanetSizes
from token2wav.published.formats import MIMI
from token2wav.published.weight_names import WRAPPERS, WeightNames

MODEL_TYPES = ("pocket_tts_audio_tokenizer",)
DECODER = "token2wav.families.pocket_tts.network:PocketDecoder"
WEIGHTS = WeightNames(
    parts=("latent_proj.", "decoder."),
    renamed=((r"^decoder\.", ""), (r"^decoder_seanet\.", "decoder."), WRAPPERS),
)


@dataclass(frozen=True)
class PocketSizes(SeanetSizes):
    """Sizes of the decoder. Fields and defaults are the published ones.

    Attributes:
        latent_stride: positions of the transformer for each latent.
    """

    LATENT = "latent_dim"

    upsampling_ratios: bounded.SomeRates = (6, 5, 4)
    num_hidden_layers: bounded.Layers = 2
    hidden_act: Literal["gelu", "gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    latent_dim: bounded.Width = 32  # length of a latent
    latent_stride: Annotated[int, Bounds(2, 1 << 10)] = 16  # at 1 there is no upsampling

    @property
    def stride(self) -> int:
        return self.latent_stride


read = CodecConfig.reader(PocketSizes, MIMI)
