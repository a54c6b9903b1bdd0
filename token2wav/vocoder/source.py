"""The harmonic source: F0 of every mel frame to an excitation signal."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from token2wav.hift_config import HiFTConfig

Phase = Literal["exact", "reference"]


class HarmonicSource(nn.Module):
    """Sines of F0 and its harmonics with noise, merged into one channel.

    Args:
        config: of the vocoder.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        self.l_linear = nn.Linear(config.nb_harmonics + 1, 1)

    def forward(
        self,
        f0: torch.Tensor,
        noise: torch.Tensor,
        phase: Phase = "exact",
        carry: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Excitation of frames that follow one another.

        Args:
            f0: (B, T) in Hz, one value per mel frame.
            noise: (T * samples_per_frame,) as `merged` gives it; or (B, T * samples_per_frame), one for each row.
            phase: rounding of the phase, see `StreamConfig`.
            carry: (B, harmonics) what the frame before returned; None at the start of an utterance.

        Returns:
            (B, 1, T * samples_per_frame), and the carries (B, T, harmonics) for frames that follow each of these.
        """
        repeat = self.config.samples_per_frame
        sine, amplitude, carries = self.frames(f0, phase, carry)
        # Sines and amplitudes are constant within a frame (the published sine is a staircase, not a smooth wave), so
        # harmonics are merged before they are repeated, and noise before it is known how loud it is.
        merged = self.l_linear(sine)[..., 0].repeat_interleave(repeat, dim=1)
        return torch.tanh(torch.addcmul(merged, amplitude.repeat_interleave(repeat, dim=1), noise))[:, None], carries

    def merged(self, noise: torch.Tensor) -> torch.Tensor:
        """Uniform numbers (N, harmonics) as they enter the excitation, (N,)."""
        return noise @ self.l_linear.weight[0]

    def frames(
        self, f0: torch.Tensor, phase: Phase, carry: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the excitation is made of: sines (B, T, harmonics), amplitude of the noise (B, T), and carries."""
        config = self.config
        multiples = torch.arange(1, config.nb_harmonics + 2, device=f0.device, dtype=f0.dtype)
        increments = (f0[..., None] * multiples / config.sampling_rate) % 1  # (B, T, harmonics) cycles per sample
        sine, carries = frame_sines(increments, config.samples_per_frame, phase, carry)
        voiced = (f0 > config.nsf_voiced_threshold).float()
        # The published noise is uniform, not Gaussian, so its mean is half its amplitude.
        amplitude = voiced * config.nsf_sigma + (1 - voiced) * config.nsf_alpha / 3
        return config.nsf_alpha * sine * voiced[..., None], amplitude, carries


def frame_sines(
    increments: torch.Tensor, samples_per_frame: int, phase: Phase, carry: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sine of every harmonic at the end of every frame.

    The increments are the published ones; only how they are summed differs. `reference` rounds every partial sum to
    float32 before it is scaled to radians, as torch's cumsum does on a CPU; the rounding grows with the sum. `exact`
    sums in double precision and keeps the phase modulo one cycle, so that it never drifts.

    Args:
        increments: (B, T, harmonics) cycles per sample, float32.
        samples_per_frame: samples that an increment lasts.
        phase: see above.
        carry: (B, harmonics) double: for `reference` the sum of all increments before, for `exact` the phase in cycles.

    Returns:
        (B, T, harmonics) float32, and the carry after every frame, (B, T, harmonics) double.
    """
    if carry is None:
        carry = increments.new_zeros(increments.shape[0], increments.shape[2], dtype=torch.float64)
    if phase == "reference":
        total = carry[:, None] + increments.double().cumsum(dim=1)
        return torch.sin(total.float() * 2 * math.pi * samples_per_frame), total
    cycles = (carry[:, None] + (increments.double() * samples_per_frame).cumsum(dim=1)) % 1
    return torch.sin(cycles * (2 * math.pi)).float(), cycles
