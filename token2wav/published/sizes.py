"""Configurations of networks, typed and frozen, which check their sizes.

Fields have the names of published files, if these have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple

from token2wav.config.values import Bounds, Length, check_bounds
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.relations import AsLong, Equals, Halves

Mask = Literal["block", "backward", "forward"]
Spacing = Literal["cosine", "linear"]  # spacing of ODE steps: short at first, or equal

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

    dim: bounded.Width
    depth: bounded.Layers
    heads: bounded.Heads
    dim_head: bounded.HeadWidth
    ff_mult: bounded.Ratio
    mel_dim: bounded.Width
    mu_dim: bounded.Width
    spk_dim: bounded.Width
    out_channels: bounded.Width
    static_chunk_size: bounded.Frames
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

    size: bounded.Width
    heads: bounded.Heads
    units: bounded.Width
    layers: bounded.Layers
    up_layers: bounded.Layers = 4  # fixed in the public code of CosyVoice2

    def __post_init__(self) -> None:
        check_bounds(self, "flow.encoder")
        if self.size % (2 * self.heads):
            raise ConfigError(
                f"flow.encoder.output_size: {self.size} is not a multiple of 2 x {self.heads}, "
                f"the attention heads"
            )


@dataclass(frozen=True)
class UNetConfig:
    channels: bounded.Width
    heads: bounded.Heads
    dim_head: bounded.Width
    mid_blocks: bounded.Layers
    layers: bounded.Layers

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
    times: bounded.Times = ()
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

    mel_dim: bounded.Width = 80
    dim: bounded.Width = 128
    channels: Annotated[tuple[bounded.Width, ...], bounded.Stages] = (256, 256, 256, 256, 768)
    kernel_sizes: bounded.Kernels = (5, 3, 3, 3, 1)
    dilations: Annotated[tuple[bounded.Dilation, ...], bounded.Stages] = (1, 2, 3, 4, 1)
    attention_channels: bounded.Width = 64
    res2net_scale: bounded.Ratio = 2
    se_channels: bounded.Width = 64

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


_THREE = ((1, 3, 5),) * 3  # dilations


@dataclass(frozen=True)
class HiFTConfig:
    """Configuration of the HiFT vocoder: the causal one of CosyVoice3, or the one of earlier
    generations.

    The defaults are the published sizes of earlier generations, some of which are only in code. In
    the causal vocoder only `conv_pre` and F0 look ahead. In the other one all convolutions are
    centred, upsampling uses transposed convolutions, and the phase of the source is continuous
    between frames.
    """

    BANDS: ClassVar[str] = "hift.in_channels"  # name of the mel bands, for messages

    in_channels: bounded.Width = 80
    base_channels: Annotated[bounded.Width, Halves("upsample_rates")] = 512
    nb_harmonics: Annotated[int, Bounds(1, 1000)] = 8
    sampling_rate: bounded.SampleRate = 24000
    nsf_alpha: bounded.Level = 0.1
    nsf_sigma: bounded.Level = 0.003
    nsf_voiced_threshold: bounded.Level = 10
    upsample_rates: bounded.SomeRates = (8, 5, 3)
    upsample_kernel_sizes: Annotated[bounded.Kernels, AsLong("upsample_rates")] = (16, 11, 7)
    n_fft: bounded.Rate = 16
    hop_len: bounded.Rate = 4
    resblock_kernel_sizes: bounded.SomeKernels = (3, 7, 11)
    resblock_dilation_sizes: Annotated[bounded.Dilations, AsLong("resblock_kernel_sizes")] = _THREE
    source_resblock_kernel_sizes: Annotated[bounded.Kernels, AsLong("upsample_rates")] = (7, 7, 11)
    source_resblock_dilation_sizes: Annotated[bounded.Dilations, AsLong("upsample_rates")] = _THREE
    lrelu_slope: bounded.Level = 0.1
    audio_limit: bounded.Level = 0.99
    conv_pre_look_right: Annotated[int, Bounds(1, 1000)] = 3
    f0_channels: bounded.Width = 512
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

    BANDS: ClassVar[str] = "num_mels"  # name of the mel bands, for messages

    resblock: Literal["1", "2"]
    upsample_rates: bounded.SomeRates
    upsample_kernel_sizes: Annotated[bounded.SomeKernels, AsLong("upsample_rates")]
    upsample_initial_channel: bounded.Width
    resblock_kernel_sizes: Annotated[tuple[bounded.OddKernel, ...], Length(16, least=1)]
    resblock_dilation_sizes: Annotated[bounded.SomeDilations, AsLong("resblock_kernel_sizes")]
    activation: Literal["snake", "snakebeta"]
    snake_logscale: bool
    num_mels: bounded.Width
    hop_size: Annotated[int, Bounds(1, 1 << 16), Equals("frame_samples", "upsample_rates")]
    sampling_rate: bounded.SampleRate
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
