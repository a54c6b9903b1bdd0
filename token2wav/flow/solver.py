"""Euler integration of the flow with classifier-free guidance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from token2wav.flow.dit import DiT, Modulation
from token2wav.flow.masks import attention_bias


def time_grid(steps: int) -> torch.Tensor:
    """The cosine schedule, (steps + 1,) float32 from 0 to 1: small steps at both ends."""
    return 1 - torch.cos(torch.linspace(0, 1, steps + 1) * 0.5 * math.pi)


def solver_times(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Times at which the estimator is evaluated, and step widths, each (steps,).

    The public solver adds widths up instead of reading the grid. The times differ from the grid by rounding only, but
    they are multiplied by 1000 before a sine, where that shows (1e-5).
    """
    grid = time_grid(steps)
    t, width = grid[0], grid[1] - grid[0]
    times, widths = [], []
    for step in range(1, steps + 1):
        times.append(t)
        widths.append(width)
        t = t + width
        if step < steps:
            width = grid[step + 1] - t
    return torch.stack(times), torch.stack(widths)


@dataclass(frozen=True)
class OdeTables:
    """All that depends on the schedule alone.

    Attributes:
        widths: of every step.
        modulation: of the estimator at every step, for one row.
        guidance: classifier-free guidance rate.
    """

    widths: list[float]
    modulation: list[Modulation]
    guidance: float

    @classmethod
    @torch.inference_mode()
    def of(cls, estimator: DiT, steps: int, guidance: float) -> OdeTables:
        times, widths = solver_times(steps)
        device = estimator.proj_out.weight.device
        return cls(widths.tolist(), [estimator.modulation(t[None].to(device)) for t in times], guidance)

    def advance(self, step: int, x: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
        """The state (B, ...) after a step, given the velocity (2B, ...) of its conditional and unconditional rows."""
        conditional, unconditional = velocity.chunk(2)
        guided = (1 + self.guidance) * conditional - self.guidance * unconditional
        return x + self.widths[step] * guided


def with_unconditional(*conditions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Conditions (B, ...) of the conditional rows, and after them zeros, the speaker included (Q6): (2B, ...)."""
    return tuple(torch.cat((value, torch.zeros_like(value))) for value in conditions)


class EulerSolver:
    """Integrates one estimator over a fixed schedule.

    Args:
        estimator: the DiT.
        steps: ODE steps.
        guidance: classifier-free guidance rate.

    Attributes:
        tables: made here, once.
    """

    def __init__(self, estimator: DiT, steps: int, guidance: float) -> None:
        self._estimator = estimator
        self.tables = OdeTables.of(estimator, steps, guidance)

    @torch.inference_mode()
    def solve(
        self,
        noise: torch.Tensor,
        mu: torch.Tensor,
        spk: torch.Tensor,
        cond: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Noise to mel, for whole sequences that start with their prompt.

        Args:
            noise, mu, cond: (B, bands, T); spk: (B, bands).
            mask: (T, T) attention mask, True where allowed; None for full attention.

        Returns:
            (B, bands, T) mel.
        """
        mu, spk, cond = with_unconditional(mu, spk, cond)
        bias = None if mask is None else attention_bias(mask)
        rope = self._estimator.rotary_embed(torch.arange(noise.shape[2], device=noise.device))
        x = noise
        for index, modulation in enumerate(self.tables.modulation):
            velocity = self._estimator.velocity(torch.cat((x, x)), mu, spk, cond, modulation, rope, bias)
            x = self.tables.advance(index, x, velocity)
        return x
