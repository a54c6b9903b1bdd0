"""Configurations of networks, typed and frozen, which check their sizes. They import no torch.

Fields have the names of published files, if these have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

from token2wav.config.settings import MOST_STEPS
from token2wav.config.values import Bounds, Length, check_bounds
from token2wav.errors import ConfigError
from token2wav.published.relations import AsLong, Equals, Even, Halves, Odd

Mask = Literal["block", "backward", "forward"]
Spacing = Literal["cosine", "linear"]  # spacing of ODE steps: short at first, or equal

# Types of numbers in model files. Their bounds are far above any published model, and low enough
# that arithmetic with them is safe.
Width = Annotated[int, Bounds(1, 1 << 16)]  # channels, features, mel bands
Layers = Annotated[int, Bounds(1, 256)]
Heads = Annotated[int, Bounds(1, 256)]
Vocabulary = Annotated[int, Bounds(1, 1 << 20)]
Tokens = Annotated[int, Bounds(1, 1000)]  # tokens of a block or of a look-ahead
Frames = Annotated[int, Bounds(1, 4000)]  # frames of a block
Ratio = Annotated[int, Bounds(1, 64)]  # mel frames per token
TokenRate = Annotated[float, Bounds(0.01, 1000)]  # tokens per second
CodeRate = Annotated[float, Bounds(0.01, 10_000)]  # frames of codes or latents per second
SampleRate = Annotated[int, Bounds(1, 768_000)]
Rate = Annotated[int, Bounds(1, 4096)]  # factor of upsampling
Kernel = Annotated[int, Bounds(1, 4096)]
CodebookCount = Annotated[int, Bounds(1, 64)]
CodebookSize = Annotated[int, Bounds(1, 1 << 20)]
Dilation = Annotated[int, Bounds(1, 4096)]
Stages = Length(16)  # stages of a vocoder, or parts of a stage
Rates = Annotated[tuple[Rate, ...], Stages]
Kernels = Annotated[tuple[Kernel, ...], Stages]
Dilations = Annotated[tuple[Annotated[tuple[Dilation, ...], Stages], ...], Stages]
OptionalWidth = Annotated[int | None, Bounds(1, 1 << 16)]  # None: other sizes give it
SomeRates = Annotated[tuple[Rate, ...], Length(16, least=1)]
SomeKernels = Annotated[tuple[Kernel, ...], Length(16, least=1)]
OddKernel = Annotated[Kernel, Odd("only odd kernels keep the length")]
SomeDilations = Annotated[tuple[Annotated[tuple[Dilation, ...], Length(16, least=1)], ...], Stages]
Levels = Annotated[tuple[Annotated[int, Bounds(2, 4096)], ...], Length(16, least=1)]  # of codes
Window = Annotated[int, Bounds(2, 1 << 16)]  # positions that a position attends to
Epsilon = Annotated[float, Bounds(1e-12, 1)]  # added in a norm
RopeBase = Annotated[float, Bounds(1, 1e9)]  # of rotary positions
FrameSamples = Annotated[int, Bounds(1, 1 << 20)]
PAIRS = "rotary positions need pairs"  # reason why the channels of a head are even
Guidance = Annotated[float, Bounds(0, 100)]
Level = Annotated[float, Bounds(1e-9, 1e6)]  # level of a signal
Times = Annotated[tuple[Annotated[float, Bounds(0, 1)], ...], Length(MOST_STEPS + 1)]

SEES: dict[Mask, tuple[int, int]] = {"block": (0, 0), "backward": (1, 0), "forward": (0, 1)}
"""By mask: numbers of blocks before and after its own block that a frame attends to."""


@dataclass(frozen=True)
class GuidedAttention:
    """Masks of the layers of an estimator, first to last."""

    layers: tuple[Mask, ...]

    @classmethod
    def assigned(
        cls, depth: int, backward: tuple[int, ...], forward: tuple[int, ...]
    ) -> GuidedAttention:
        """Gives every layer the block mask, except the layers listed, which count from 1."""
        masks: list[Mask] = ["block"] * depth
        for name, numbers in (("backward", backward), ("forward", forward)):
            for number in numbers:
                if not 1 <= number <= depth:
                    raise ConfigError(
                        f"{name}_layers: {number} is not one of the layers 1 to {depth}"
                    )
                if masks[number - 1] != "block":
                    raise ConfigError(
                        f"{name}_layers: layer {number} already has the mask {masks[number - 1]}"
                    )
                masks[number - 1] = "backward" if name == "backward" else "forward"
        return cls(tuple(masks))

    @property
    def past_blocks(self) -> int:
        """Earlier blocks on which the output in a block depends."""
        return sum(SEES[mask][0] for mask in self.layers)

    @property
    def future_blocks(self) -> int:
        """Later blocks on which the output in a block depends: the look-ahead."""
        return sum(SEES[mask][1] for mask in self.layers)


@dataclass(frozen=True)
class EstimatorConfig:
    """Configuration of the DiT estimator. Fields have the names of `cosyvoice3.yaml`.

    Attributes:
        guided: masks of the layers. None: every layer attends to its own block and all earlier
            ones.
        position_convolutions: False for an estimator without convolutions that add positions to
            the frames. None, and not True, so that hashes of other configurations stay the same.
        long_skip_connection: True for an estimator that joins the input of its first layer to the
            output of its last one. None, and not False, for the same reason.
    """

    dim: Width
    depth: Layers
    heads: Heads
    dim_head: Annotated[Width, Even(PAIRS)]
    ff_mult: Ratio
    mel_dim: Width
    mu_dim: Width
    spk_dim: Width
    out_channels: Width
    static_chunk_size: Frames
    guided: GuidedAttention | None = None
    position_convolutions: Literal[False] | None = None
    long_skip_connection: Literal[True] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "flow.decoder.estimator")
        if self.dim % 16 and self.position_convolutions is None:
            raise ConfigError(
                f"flow.decoder.estimator.dim: {self.dim} is not a multiple of 16, the convolution "
                f"groups"
            )
        if self.guided is not None:
            return
        if not self.mel_dim == self.mu_dim == self.out_channels == self.spk_dim:
            raise ConfigError(
                "flow.decoder.estimator: mel_dim, mu_dim, spk_dim and out_channels must be equal, "
                "got "
                f"{self.mel_dim}, {self.mu_dim}, {self.spk_dim}, {self.out_channels}"
            )


@dataclass(frozen=True)
class ConformerConfig:
    """Configuration of the conformer encoder.

    Attributes:
        layers, up_layers: layers before and after upsampling by two.
    """

    size: Width
    heads: Heads
    units: Width
    layers: Layers
    up_layers: Layers = 4  # fixed in the public code of CosyVoice2

    def __post_init__(self) -> None:
        check_bounds(self, "flow.encoder")
        if self.size % (2 * self.heads):
            raise ConfigError(
                f"flow.encoder.output_size: {self.size} is not a multiple of 2 x {self.heads}, "
                f"the attention heads"
            )


@dataclass(frozen=True)
class UNetConfig:
    channels: Width
    heads: Heads
    dim_head: Width
    mid_blocks: Layers
    layers: Layers

    def __post_init__(self) -> None:
        check_bounds(self, "flow.decoder.estimator")


@dataclass(frozen=True)
class ScheduleConfig:
    """Schedule of the ODE: the times of its steps.

    Attributes:
        kind: spacing of the steps, if `times` is empty. `sway` is `cosine` as Qwen2.5-Omni computes
            it, with other rounding.
        times: times of a distilled model: the start of every step, from 0 on, and the end, 1.
        method: `rk4` evaluates the estimator four times in each step (Kutta's 3/8 rule). None is
            Euler's method, so that hashes of configurations with it stay the same.
    """

    kind: Spacing | Literal["sway"] = "cosine"
    times: Times = ()
    method: Literal["rk4"] | None = None

    def __post_init__(self) -> None:
        if not self.times:
            return
        if len(self.times) < 2 or (self.times[0], self.times[-1]) != (0, 1):
            raise ConfigError(
                f"times: {len(self.times)} values; the first must be 0 and the last 1"
            )
        for index, (before, after) in enumerate(pairwise(self.times), start=1):
            if after <= before:
                raise ConfigError(f"times[{index}]: {after:g} is not greater than {before:g}")


@dataclass(frozen=True)
class CodebookConfig:
    """Codebooks of tokens that consist of several codes. Every codebook has its own vocabulary.

    Attributes:
        merge: `sum` adds the embeddings of the codes. `concat` concatenates them, each with an
            equal share of the width.
    """

    count: Annotated[int, Bounds(1, 256)]
    merge: Literal["sum", "concat"] = "sum"

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ConfigError(
                f"flow.codebooks.count: {self.count} is below 2; for one code per token, "
                "remove codebooks"
            )


@dataclass(frozen=True)
class EcapaConfig:
    """Configuration of ECAPA-TDNN, which turns the mel of a speaker into a vector. Fields have the
    names of Qwen2.5-Omni, without `enc_`. Its section of the file checks them.

    Attributes:
        channels: channels of the first convolution, of every block, and of all blocks together.
        kernel_sizes, dilations: of the same layers.
        res2net_scale: parts into which a block divides its channels.
    """

    mel_dim: Width = 80
    dim: Width = 128
    channels: Annotated[tuple[Width, ...], Stages] = (256, 256, 256, 256, 768)
    kernel_sizes: Kernels = (5, 3, 3, 3, 1)
    dilations: Annotated[tuple[Dilation, ...], Stages] = (1, 2, 3, 4, 1)
    attention_channels: Width = 64
    res2net_scale: Ratio = 2
    se_channels: Width = 64

    @property
    def least_frames(self) -> int:
        """Least frames of a mel, because the edges are padded with their reflection."""
        reach = max(
            (kernel - 1) * dilation // 2
            for kernel, dilation in zip(self.kernel_sizes, self.dilations, strict=True)
        )
        return reach + 1


class MelSettings(NamedTuple):
    """Settings of mel on which a flow and a vocoder must agree."""

    sample_rate_hz: int
    hop_samples: int  # samples per frame
    bands: int


_DILATIONS = ((1, 3, 5),) * 3


@dataclass(frozen=True)
class HiFTConfig:
    """Configuration of the HiFT vocoder: the causal one of CosyVoice3, or the one of earlier
    generations.

    The defaults are the published sizes of earlier generations, some of which are only in code. In
    the causal vocoder only `conv_pre` and F0 look ahead. In the other one all convolutions are
    centred, upsampling uses transposed convolutions, and the phase of the source is continuous
    between frames.
    """

    in_channels: Width = 80
    base_channels: Annotated[Width, Halves("upsample_rates")] = 512
    nb_harmonics: Annotated[int, Bounds(1, 1000)] = 8
    sampling_rate: SampleRate = 24000
    nsf_alpha: Level = 0.1
    nsf_sigma: Level = 0.003
    nsf_voiced_threshold: Level = 10
    upsample_rates: SomeRates = (8, 5, 3)
    upsample_kernel_sizes: Annotated[Kernels, AsLong("upsample_rates")] = (16, 11, 7)
    n_fft: Rate = 16
    hop_len: Rate = 4
    resblock_kernel_sizes: SomeKernels = (3, 7, 11)
    resblock_dilation_sizes: Annotated[Dilations, AsLong("resblock_kernel_sizes")] = _DILATIONS
    source_resblock_kernel_sizes: Annotated[Kernels, AsLong("upsample_rates")] = (7, 7, 11)
    source_resblock_dilation_sizes: Annotated[Dilations, AsLong("upsample_rates")] = _DILATIONS
    lrelu_slope: Level = 0.1
    audio_limit: Level = 0.99
    conv_pre_look_right: Annotated[int, Bounds(1, 1000)] = 3
    f0_channels: Width = 512
    causal: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, "hift")
        if self.n_fft % 2 or self.n_fft < 2 * self.hop_len:
            raise ConfigError(
                f"hift.istft_params: n_fft {self.n_fft} must be even and at least twice hop_len "
                f"{self.hop_len}"
            )

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.upsample_rates) * self.hop_len

    @property
    def mel(self) -> MelSettings:
        return MelSettings(self.sampling_rate, self.samples_per_frame, self.in_channels)


@dataclass(frozen=True)
class BigVGANConfig:
    """Configuration of BigVGAN v1 or v2.

    Fields have the public names. Fields that a file may omit have the public defaults.
    """

    resblock: Literal["1", "2"]
    upsample_rates: SomeRates
    upsample_kernel_sizes: Annotated[SomeKernels, AsLong("upsample_rates")]
    upsample_initial_channel: Width
    resblock_kernel_sizes: Annotated[tuple[OddKernel, ...], Length(16, least=1)]
    resblock_dilation_sizes: Annotated[SomeDilations, AsLong("resblock_kernel_sizes")]
    activation: Literal["snake", "snakebeta"]
    snake_logscale: bool
    num_mels: Width
    hop_size: Annotated[int, Bounds(1, 1 << 16), Equals("frame_samples", "upsample_rates")]
    sampling_rate: SampleRate
    use_tanh_at_final: bool = True
    use_bias_at_final: bool = True

    def __post_init__(self) -> None:
        check_bounds(self, "")
        for index, (kernel, rate) in enumerate(
            zip(self.upsample_kernel_sizes, self.upsample_rates, strict=True)
        ):
            if kernel < rate or (kernel - rate) % 2:
                raise ConfigError(
                    f"upsample_kernel_sizes[{index}]: {kernel} must equal the rate {rate} "
                    f"or exceed it by an even number, so that a stage makes {rate} samples "
                    "of each sample"
                )
        if not self.upsample_initial_channel >> (stages := len(self.upsample_rates)):
            raise ConfigError(
                f"upsample_initial_channel: {self.upsample_initial_channel} is too small "
                f"for {stages} stages, which halve it each; at least {1 << stages} channels "
                "are needed"
            )

    @property
    def frame_samples(self) -> int:
        return math.prod(self.upsample_rates)

    @property
    def mel(self) -> MelSettings:
        return MelSettings(self.sampling_rate, self.hop_size, self.num_mels)
