"""Euler integration of the flow with classifier-free guidance."""

from __future__ import annotations

import math

import torch

from token2wav.flow.cache import ChunkMemory
from token2wav.flow.dit import DiT
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


class EulerSolver:
    """Integrates one estimator over a fixed schedule; all that depends on time alone is a table made here.

    Args:
        estimator: the DiT.
        steps: ODE steps.
        guidance: classifier-free guidance rate.
    """

    def __init__(self, estimator: DiT, steps: int, guidance: float) -> None:
        self._estimator = estimator
        self._guidance = guidance
        times, widths = solver_times(steps)
        self._widths: list[float] = widths.tolist()
        device = estimator.proj_out.weight.device
        with torch.inference_mode():
            self._modulation = [estimator.modulation(t[None].to(device)) for t in times]

    @torch.inference_mode()
    def solve(
        self,
        noise: torch.Tensor,
        mu: torch.Tensor,
        spk: torch.Tensor,
        cond: torch.Tensor,
        mask: torch.Tensor | None,
        memory: ChunkMemory | None = None,
        start: int = 0,
    ) -> torch.Tensor:
        """Noise to mel.

        Args:
            noise, mu, cond: (B, bands, T); spk: (B, bands).
            mask: (T, keys) attention mask, True where allowed; None for full attention.
            memory: of the frames before these, B = 1; None for whole sequences that start with their prompt.
            start: position of the first frame, counted from the start of the prompt.

        Returns:
            (B, bands, T) mel.
        """
        rows = noise.shape[0]
        # The second half of the batch is unconditional: everything but the state is zero, the speaker included (Q6).
        mu, spk, cond = (torch.cat((value, torch.zeros_like(value))) for value in (mu, spk, cond))
        bias = None if mask is None else attention_bias(mask)
        rope = self._estimator.rotary_embed(torch.arange(start, start + noise.shape[2], device=noise.device))
        x = noise
        for index, (width, modulation) in enumerate(zip(self._widths, self._modulation, strict=True)):
            step = None if memory is None else memory.step(index)
            velocity = self._estimator.velocity(torch.cat((x, x)), mu, spk, cond, modulation, rope, bias, step)
            conditional, unconditional = velocity[:rows], velocity[rows:]
            x = x + width * ((1 + self._guidance) * conditional - self._guidance * unconditional)
        return x
