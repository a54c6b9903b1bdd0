"""The harmonic source: F0 of every mel frame to an excitation signal."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.networks.configs import HiFTConfig
from token2wav.networks.f0 import F0_LOOKAHEAD
from token2wav.networks.streaming import WHOLE, Piece, Streaming

Phase = Literal["exact", "reference"]


class HarmonicSource(Streaming):
    """Sines of F0 and its harmonics with noise, merged into one channel. It keeps their phases.

    Args:
        config: of the vocoder.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        self.l_linear = nn.Linear(config.nb_harmonics + 1, 1)
        self.keeps, self.delay = (config.nb_harmonics + 1,), F0_LOOKAHEAD

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float64

    def forward(
        self, f0: torch.Tensor, noise: torch.Tensor, phase: Phase = "exact", piece: Piece = WHOLE
    ) -> torch.Tensor:
        """Excitation (B, 1, T * samples_per_frame) of the next frames.

        Args:
            f0: (B, T) in Hz, one value per mel frame.
            noise: (T * samples_per_frame,) as `merged` gives it; or (B, T * samples_per_frame), one for each row.
            phase: rounding of the phase, see `frame_sines`.
            piece: their place in the utterances.
        """
        repeat = self.config.samples_per_frame
        if piece.first:
            f0 = F.pad(f0[:, self.delay :], (self.delay, 0))  # nothing turns before the start
        kept = None if piece.first or piece.state is None else piece.state[self]
        sine, amplitude, carry = self.frames(f0, phase, kept)
        piece.keep(self, carry)
        # Sines and amplitudes are constant within a frame (the published sine is a staircase, not a smooth wave), so
        # harmonics are merged before they are repeated, and noise before it is known how loud it is.
        merged = self.l_linear(sine)[..., 0].repeat_interleave(repeat, dim=1)
        return torch.tanh(torch.addcmul(merged, amplitude.repeat_interleave(repeat, dim=1), noise))[:, None]

    def merged(self, noise: torch.Tensor) -> torch.Tensor:
        """Uniform numbers (N, harmonics) as they enter the excitation, (N,)."""
        return noise @ self.l_linear.weight[0]

    def frames(
        self, f0: torch.Tensor, phase: Phase, carry: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parts of the excitation: sines (B, T, harmonics), amplitude of the noise (B, T), and the carry."""
        config = self.config
        multiples = torch.arange(1, config.nb_harmonics + 2, device=f0.device, dtype=f0.dtype)
        increments = (f0[..., None] * multiples / config.sampling_rate) % 1  # (B, T, harmonics) cycles per sample
        sine, carry = frame_sines(increments, config.samples_per_frame, phase, carry)
        voiced = (f0 > config.nsf_voiced_threshold).float()
        # The published noise is uniform, not Gaussian, so its mean is half its amplitude.
        amplitude = voiced * config.nsf_sigma + (1 - voiced) * config.nsf_alpha / 3
        return config.nsf_alpha * sine * voiced[..., None], amplitude, carry


def frame_sines(
    increments: torch.Tensor, samples_per_frame: int, phase: Phase, carry: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sine of every harmonic at the end of every frame.

    The increments are the published ones; only how they are summed differs. `reference`, for whole utterances, rounds
    every partial sum to float32 before it is scaled to radians, as torch's cumsum does on a CPU; the rounding grows
    with the sum. `exact` sums in double precision and keeps the phase modulo one cycle, so that it never drifts.

    Args:
        increments: (B, T, harmonics) cycles per sample, float32.
        samples_per_frame: samples that an increment lasts.
        phase: see above.
        carry: (B, harmonics) double: the phase in cycles before the first frame.

    Returns:
        (B, T, harmonics) float32, and the carry after the last frame, (B, harmonics) double.
    """
    if carry is None:
        carry = increments.new_zeros(increments.shape[0], increments.shape[2], dtype=torch.float64)
    if phase == "reference":
        total = increments.double().cumsum(dim=1)
        return torch.sin(total.float() * 2 * math.pi * samples_per_frame), carry
    cycles = (carry[:, None] + (increments.double() * samples_per_frame).cumsum(dim=1)) % 1
    return torch.sin(cycles * (2 * math.pi)).float(), cycles[:, -1]
