"""Harmonic source of Chatterbox and CosyVoice1, whose phase advances sample by sample."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.source import HarmonicSource, Phase, PhaseCourse
from token2wav.published.sizes import HiFTConfig


class SampleSource(HarmonicSource):
    """Harmonic source whose phase advances sample by sample. Every harmonic starts at a random
    phase.

    The public code draws the start phases anew for every utterance. Here they are drawn once.
    """

    begins: torch.Tensor

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__(config)
        begins = torch.rand(
            config.nb_harmonics + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        begins[0] = 0
        self.register_buffer("begins", begins, persistent=False)

    @property
    def course(self) -> PhaseCourse:
        return PhaseCourse(advances=True, begins=self.begins)

    def forward(
        self,
        f0: torch.Tensor,
        noise: torch.Tensor,
        phase: Phase = "exact",
        step: StreamStep = OFFLINE,
    ) -> torch.Tensor:
        """Computes the excitation as `HarmonicSource` does.

        `phase` has no effect, because the rounding that it selects is a detail of CosyVoice3.
        """
        repeat = self.config.samples_per_frame
        if step.first:
            f0 = F.pad(f0[:, self.input.delay :], (self.input.delay, 0))
        cycles = self._increments(f0).double() * repeat  # (B, T, harmonics) cycles per frame
        start = self.begins if step.first or step.state is None else step.state[self][:, None]
        ends = start + cycles.cumsum(dim=1)
        step.save_state(self, ends[:, -1] % 1)
        back = torch.arange(1, repeat + 1, device=f0.device, dtype=torch.float64) / repeat - 1
        # (B, T, harmonics, samples)
        angles = torch.addcmul(ends[..., None] % 1, cycles[..., None], back) % 1
        merged = (self.l_linear.weight @ torch.sin(angles.float() * (2 * math.pi))).flatten(1)
        gain, amplitude = (level.repeat_interleave(repeat, dim=1) for level in self._levels(f0))
        return torch.tanh(torch.addcmul(amplitude * noise, gain, merged) + self.l_linear.bias)[
            :, None
        ]
