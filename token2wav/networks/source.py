"""F0 predictor of HiFT, and its harmonic source, which makes an excitation signal from F0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from token2wav.layers.combine import placed
from token2wav.layers.convolutions import StreamConv, causal_conv, centred_conv, lookahead_conv
from token2wav.layers.streaming import (
    OFFLINE,
    ON_TIME,
    Delay,
    Streaming,
    StreamModule,
    StreamStep,
    Timing,
)
from token2wav.published.sizes import HiFTConfig

F0_LOOKAHEAD = 3  # later mel frames that an F0 value of a causal vocoder depends on
_CONVS, _KERNEL = 5, 3


class F0Predictor(StreamModule):
    """Predictor of F0 from mel. It runs in double precision, as in the public code, because the
    phase is the sum of F0 over time, and errors add up.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        channels = config.f0_channels
        if config.causal:
            convs = [lookahead_conv(config.in_channels, channels, F0_LOOKAHEAD + 1)]
            convs += [causal_conv(channels, channels, _KERNEL) for _ in range(_CONVS - 1)]
        else:
            widths = [config.in_channels] + [channels] * (_CONVS - 1)
            convs = [centred_conv(width, channels, _KERNEL) for width in widths]
        self._rounds = config.causal
        self.condnet = nn.Sequential(
            *(layer for conv in convs for layer in (weight_norm(conv), nn.ELU()))
        )
        self.classifier = nn.Linear(channels, 1)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        return placed(self.condnet, timing)

    def forward(self, mel: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Predicts F0 in Hz (B, T) from mel (B, bands, T).

        The result has the dtype of mel if the public code rounds it (causal vocoders), else it has
        the weight dtype.
        """
        x = mel.to(self.classifier.weight.dtype)
        for layer in self.condnet:
            x = layer(x, step) if isinstance(layer, StreamConv) else layer(x)
        f0 = self.classifier(x.transpose(1, 2)).abs().squeeze(-1)
        return f0.to(mel.dtype) if self._rounds else f0


Phase = Literal["exact", "reference"]  # rounding of the phase, see `frame_sines`


@dataclass(frozen=True)
class PhaseCourse:
    """Course of the phase of a harmonic source within a frame, for kernels that compute it.

    Attributes:
        advances: whether the phase advances from sample to sample. If not, the whole frame has the
            phase of its end.
        offset: time of the phase of a sample, in samples from the start of the sample.
        half_frame: whether the phase runs from the middle of a frame to the middle of the next. It
            then does not advance before the first middle and after the last middle.
        begins: phases of the harmonics at the start of a stream, in cycles; None for zeros.
    """

    advances: bool = False
    offset: float = 1.0
    half_frame: bool = False
    begins: torch.Tensor | None = None


class HarmonicSource(Streaming):
    """Sines of F0 and of its harmonics, and noise, merged into one channel.

    Its state is the phase of every harmonic.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        self.l_linear = nn.Linear(config.nb_harmonics + 1, 1)
        self.state_shape = (config.nb_harmonics + 1,)

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float64

    @property
    def course(self) -> PhaseCourse:
        return PhaseCourse()

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.input = timing
        self.output = Timing(*(count * self.config.samples_per_frame for count in timing))
        return self.output

    def forward(
        self,
        f0: torch.Tensor,
        noise: torch.Tensor,
        phase: Phase = "exact",
        step: StreamStep = OFFLINE,
    ) -> torch.Tensor:
        """Computes the excitation (B, 1, T * samples_per_frame) of the next frames.

        Args:
            f0: (B, T) in Hz, one value per mel frame.
            noise: (T * samples_per_frame,) result of `merged` for all rows, or (B, T *
                samples_per_frame) for each row.
        """
        repeat = self.config.samples_per_frame
        if step.first:
            # The first frames lie before the start of the stream. F0 is zero there, so that the
            # phase does not advance.
            f0 = F.pad(f0[:, self.input.delay :], (self.input.delay, 0))
        carry = None if step.first or step.state is None else step.state[self]
        sine, amplitude, carry = self.frames(f0, phase, carry)
        step.save_state(self, carry)
        # Sines and amplitudes are constant within a frame: as in the public code, the sine is a
        # staircase and not a smooth wave. Harmonics are therefore merged once per frame, and the
        # result is repeated for all its samples. Noise was merged before its amplitude was known.
        merged = self.l_linear(sine)[..., 0].repeat_interleave(repeat, dim=1)
        return torch.tanh(torch.addcmul(merged, amplitude.repeat_interleave(repeat, dim=1), noise))[
            :, None
        ]

    def merged(self, noise: torch.Tensor) -> torch.Tensor:
        """Merges random numbers (N, harmonics) into the noise (N,) of the excitation."""
        return noise @ self.l_linear.weight[0]

    def frames(
        self, f0: torch.Tensor, phase: Phase, carry: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the sines (B, T, harmonics), the noise amplitude (B, T), and the phases after
        the last frame.
        """
        sine, carry = frame_sines(self._increments(f0), self.config.samples_per_frame, phase, carry)
        gain, amplitude = self._levels(f0)
        return sine * gain[..., None], amplitude, carry

    def _increments(self, f0: torch.Tensor) -> torch.Tensor:
        """Computes the cycles per sample of every harmonic, (B, T, harmonics)."""
        multiples = torch.arange(1, self.config.nb_harmonics + 2, device=f0.device, dtype=f0.dtype)
        return (f0[..., None] * multiples / self.config.sampling_rate) % 1

    def _levels(self, f0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the sine and noise amplitudes, (B, T) each.

        The noise of CosyVoice3 is uniform in [0, 1), so its mean is half of its amplitude.
        """
        config = self.config
        voiced = (f0 > config.nsf_voiced_threshold).float()
        return config.nsf_alpha * voiced, voiced * config.nsf_sigma + (
            1 - voiced
        ) * config.nsf_alpha / 3


class SmoothSource(HarmonicSource):
    """Harmonic source of the models before CosyVoice3. Its phase runs linearly from the middle of a
    frame to the middle of the next frame.

    A step of a stream therefore ends in the middle of its last frame.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__(config)
        self.levels_delay = Delay(2, config.samples_per_frame // 2)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        self.output = self.levels_delay.place(super().place(timing))
        return self.output

    @property
    def course(self) -> PhaseCourse:
        return PhaseCourse(advances=True, offset=0.5, half_frame=True)

    def forward(
        self,
        f0: torch.Tensor,
        noise: torch.Tensor,
        phase: Phase = "exact",
        step: StreamStep = OFFLINE,
    ) -> torch.Tensor:
        """`phase` has no effect, because only CosyVoice3 has the rounding that it selects."""
        repeat = self.config.samples_per_frame
        gain, amplitude = (level.repeat_interleave(repeat, dim=1) for level in self._levels(f0))
        gain, noise = self.levels_delay(torch.stack((gain, amplitude * noise), dim=1), step).unbind(
            1
        )
        cycles = self._increments(f0).double() * repeat  # (B, T, harmonics) in a frame
        if step.state is None:
            cycles = F.pad(cycles, (0, 0, 0, 1))
        if step.frames_past_end:
            cycles[:, f0.shape[1] - step.frames_past_end + self.input.delay :] = 0
        if step.state is None or step.first:
            start = self.input.delay if step.first else 0
            cycles[:, :start] = 0
            ends, slopes = cycles.cumsum(dim=1), cycles.clone()
            slopes[:, start] = 0
        else:
            ends, slopes = step.state[self][:, None] + cycles.cumsum(dim=1), cycles
        step.save_state(self, ends[:, -1] % 1)
        back = (torch.arange(repeat, device=f0.device, dtype=torch.float64) + 0.5) / repeat - 1
        # (B, T, harmonics, samples)
        angles = torch.addcmul(ends[..., None] % 1, slopes[..., None], back) % 1
        sines = torch.sin(angles.float() * (2 * math.pi))
        # (B, T * samples), half a frame early for whole sequences
        merged = (self.l_linear.weight @ sines).flatten(1)
        if step.state is None:
            merged = merged[:, repeat // 2 : repeat // 2 + gain.shape[1]]
        return torch.tanh(torch.addcmul(noise, gain, merged) + self.l_linear.bias)[:, None]


def frame_sines(
    increments: torch.Tensor, samples_per_frame: int, phase: Phase, carry: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the sine of every harmonic at the end of every frame.

    The increments are those of the public code; only the summation differs. `exact` sums in double
    precision and keeps the phase modulo one cycle, so that it never drifts. `reference` repeats the
    public code, and is for whole utterances. It rounds every partial sum to float32 before the sum
    is scaled to radians, as torch's cumsum does on a CPU. This error grows with the sum.

    Args:
        increments: (B, T, harmonics) cycles per sample, float32, constant within a frame.
        carry: (B, harmonics) double: phase in cycles before the first frame; None for zero.

    Returns:
        (B, T, harmonics) float32 sines, and the phase after the last frame. `reference` returns
        `carry` instead of that phase.
    """
    if carry is None:
        carry = increments.new_zeros(increments.shape[0], increments.shape[2], dtype=torch.float64)
    if phase == "reference":
        total = increments.double().cumsum(dim=1)
        return torch.sin(total.float() * 2 * math.pi * samples_per_frame), carry
    cycles = (carry[:, None] + (increments.double() * samples_per_frame).cumsum(dim=1)) % 1
    return torch.sin(cycles * (2 * math.pi)).float(), cycles[:, -1]
