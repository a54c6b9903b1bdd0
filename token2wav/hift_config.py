"""Configuration of CosyVoice3's vocoder, typed and frozen: it gives sizes and rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from token2wav.bigvgan_config import MelSettings
from token2wav.config_values import all_positive
from token2wav.errors import ConfigError


@dataclass(frozen=True)
class HiFTConfig:
    """Configuration of HiFT, which turns mel into audio: CosyVoice3's causal one, or that of generations before it.

    Attributes:
        causal: whether only `conv_pre` and F0 look ahead; else all convolutions see as much on both sides, upsampling
            is by transposed convolutions, and the source's phase goes smoothly from frame to frame.
    """

    in_channels: int
    base_channels: int
    nb_harmonics: int
    sampling_rate: int
    nsf_alpha: float
    nsf_sigma: float
    nsf_voiced_threshold: float
    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    n_fft: int
    hop_len: int
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilation_sizes: tuple[tuple[int, ...], ...]
    source_resblock_kernel_sizes: tuple[int, ...]
    source_resblock_dilation_sizes: tuple[tuple[int, ...], ...]
    lrelu_slope: float
    audio_limit: float
    conv_pre_look_right: int
    f0_channels: int
    causal: bool = True

    def __post_init__(self) -> None:
        all_positive(self, "hift", zero_too=("causal",))
        stages = len(self.upsample_rates)
        for name in ("upsample_rates", "resblock_kernel_sizes"):
            if not getattr(self, name):
                raise ConfigError(f"hift.{name}: empty; at least 1 is needed")
        if not len(self.upsample_kernel_sizes) == len(self.source_resblock_kernel_sizes) == stages:
            raise ConfigError(
                "hift: upsample_rates, upsample_kernel_sizes and source_resblock_kernel_sizes differ in length"
            )
        if len(self.source_resblock_dilation_sizes) != stages:
            raise ConfigError("hift: source_resblock_dilation_sizes needs one list per upsampling stage")
        if len(self.resblock_dilation_sizes) != len(self.resblock_kernel_sizes):
            raise ConfigError("hift: resblock_dilation_sizes needs one list per resblock kernel size")
        if self.base_channels % 2**stages:
            raise ConfigError(f"hift.base_channels: {self.base_channels} cannot be halved {stages} times")
        if self.n_fft % 2 or self.n_fft < 2 * self.hop_len:
            raise ConfigError(
                f"hift.istft_params: n_fft {self.n_fft} must be even and at least twice hop_len {self.hop_len}"
            )

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.upsample_rates) * self.hop_len

    @property
    def mel(self) -> MelSettings:
        return MelSettings(self.sampling_rate, self.samples_per_frame, self.in_channels)
