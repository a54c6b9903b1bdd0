"""The harmonic source: F0 of every mel frame to an excitation signal."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from token2wav.model_config import HiFTConfig


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
        self, f0: torch.Tensor, noise: torch.Tensor, phase: Literal["exact", "reference"] = "exact"
    ) -> torch.Tensor:
        """Excitation of a whole utterance.

        Args:
            f0: (B, T) in Hz, one value per mel frame.
            noise: (T * samples_per_frame, harmonics) uniform numbers.
            phase: rounding of the phase, see `StreamConfig`.

        Returns:
            (B, 1, T * samples_per_frame).
        """
        return torch.tanh(self.l_linear(self.harmonics(f0, noise, phase))).transpose(1, 2)

    def harmonics(self, f0: torch.Tensor, noise: torch.Tensor, phase: Literal["exact", "reference"]) -> torch.Tensor:
        """The sines with their noise before they are merged, (B, T * samples_per_frame, harmonics)."""
        config = self.config
        repeat = config.samples_per_frame
        sine = frame_sines(f0, config.nb_harmonics + 1, config.sampling_rate, repeat, phase)  # (B, T, harmonics)
        voiced = (f0 > config.nsf_voiced_threshold)[..., None].float()
        sine = config.nsf_alpha * sine * voiced
        # The published noise is uniform, not Gaussian, so its mean is half its amplitude.
        amplitude = voiced * config.nsf_sigma + (1 - voiced) * config.nsf_alpha / 3
        # Both are constant within a frame: the published sine is a staircase, not a smooth wave.
        return sine.repeat_interleave(repeat, dim=1) + amplitude.repeat_interleave(repeat, dim=1) * noise


def frame_sines(
    f0: torch.Tensor,
    harmonics: int,
    sample_rate: int,
    samples_per_frame: int,
    phase: Literal["exact", "reference"],
) -> torch.Tensor:
    """Sine of every harmonic at the end of every frame, (B, T) Hz to (B, T, harmonics).

    The increments (cycles per sample, float32) are the published ones; only how they are summed differs. `reference`
    rounds every partial sum to float32 before it is scaled to radians, as torch's cumsum does on a CPU; the rounding
    grows with the sum. `exact` sums in double precision and keeps the phase modulo one cycle.
    """
    multiples = torch.arange(1, harmonics + 1, device=f0.device, dtype=f0.dtype)
    increments = (f0[..., None] * multiples / sample_rate) % 1  # cycles per sample
    total = increments.double().cumsum(dim=1)
    if phase == "reference":
        return torch.sin(total.float() * 2 * math.pi * samples_per_frame)
    return torch.sin((total * samples_per_frame % 1) * (2 * math.pi)).float()
