"""Configuration of the codec of Pocket TTS, from `config.json` of a `transformers` folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from token2wav.config.token_format import TokenFormat
from token2wav.config.values import Bounds
from token2wav.published.codec_config import CodecConfig, read_seanet_sizes
from token2wav.published.codec_sizes import SeanetSizes
from token2wav.published.sizes import Layers, Rates, Width

FILES = ()
MODEL_TYPES = ("pocket_tts_audio_tokenizer",)


@dataclass(frozen=True)
class PocketSizes(SeanetSizes):
    """Sizes of the decoder. Fields and defaults are the published ones.

    Attributes:
        latent_dim: length of a latent.
        latent_stride: positions of the transformer for each latent.
    """

    upsampling_ratios: Rates = (6, 5, 4)
    num_hidden_layers: Layers = 2
    hidden_act: Literal["gelu", "gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    latent_dim: Width = 32
    latent_stride: Annotated[int, Bounds(2, 1 << 10)] = 16  # at 1 there is no upsampling

    @property
    def stride(self) -> int:
        return self.latent_stride


@dataclass(frozen=True, kw_only=True)
class PocketConfig(CodecConfig):
    """Configuration of the codec of Pocket TTS."""

    sizes: PocketSizes


def read(folder: Path) -> PocketConfig:
    """Reads the configuration of a folder. Settings of the encoder are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or of an unsupported variant.
    """
    sizes = read_seanet_sizes(folder, PocketSizes)
    samples = sizes.frame_samples
    return PocketConfig(
        tokens=TokenFormat.latents(sizes.latent_dim),
        sample_rate=sizes.sampling_rate,
        samples_per_token=samples,
        sizes=sizes,
    )
