"""Solver of the flow, which integrates noise to mel, with classifier-free guidance.

The ODE time runs from 0 (noise) to 1 (mel). With guidance every state is evaluated in two rows: the
conditional row has its conditions, and the unconditional row has zeros instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from token2wav.networks.estimator import Estimator, Modulation
from token2wav.networks.masks import attention_bias
from token2wav.published.sizes import ScheduleConfig

_COSINE = ScheduleConfig()

# State of an ODE: the point of the next evaluation, and inside of a step also the start of the step
# and the velocities of its evaluations so far.
OdeState = tuple[torch.Tensor, ...]
# Velocity weights of a step in every point after an evaluation. The last point is the step's end.
Weights = tuple[tuple[float, ...], ...]
EULER: Weights = ((1.0,),)
_RK4: Weights = (  # Kutta's 3/8 rule
    (1 / 3,),
    (-1 / 3, 1.0),
    (1.0, -1.0, 1.0),
    (1 / 8, 3 / 8, 3 / 8, 1 / 8),
)


def time_grid(steps: int, schedule: ScheduleConfig = _COSINE) -> torch.Tensor:
    """Computes the times between the steps: (steps + 1,) float32 from 0 to 1."""
    if schedule.times:
        return torch.tensor(schedule.times)
    grid = torch.linspace(0, 1, steps + 1)
    if schedule.kind == "sway":
        return grid - (torch.cos(math.pi / 2 * grid) - 1 + grid)
    return 1 - torch.cos(grid * 0.5 * math.pi) if schedule.kind == "cosine" else grid


def solver_times(
    steps: int, schedule: ScheduleConfig = _COSINE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the times at which the estimator is evaluated, and the step widths, each (steps,).

    As in the public solver, each time is the sum of the widths before it. The sums differ from
    `time_grid` by rounding only. But the estimator takes sines of 1000 times these times, where the
    rounding has an effect of 1e-5.
    """
    grid = time_grid(steps, schedule)
    t, width = grid[0], grid[1] - grid[0]
    times, widths = [], []
    for step in range(1, steps + 1):
        times.append(t)
        widths.append(width)
        t = t + width
        if step < steps:
            width = grid[step + 1] - t
    return torch.stack(times), torch.stack(widths)


def _rk4_times(
    steps: int, schedule: ScheduleConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the times of all evaluations (4 * steps,), the step ends (4 * steps,), and the step
    widths (steps,).
    """
    grid = time_grid(steps, schedule)
    starts, ends = grid[:-1], grid[1:]
    widths = ends - starts
    times = [starts, starts + widths * (1 / 3), starts + widths * (2 / 3), ends]
    return torch.stack(times, dim=1).flatten(), ends.repeat_interleave(4), widths


@dataclass(frozen=True)
class OdeTables:
    """Tables of all values that depend only on the schedule of the ODE.

    Attributes:
        modulation: modulation of the estimator at every evaluation, for one row; see
            `Estimator.modulation`.
        guidance: classifier-free guidance rate; 0 for no unconditional rows.
        stored_steps: for every step the index of the stored state that it reads and writes. The
            stores of a stream have one state for each step of its whole schedule.
    """

    widths: list[float]
    modulation: list[Modulation]
    guidance: float
    stored_steps: list[int]
    weights: Weights = EULER

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        estimator: Estimator,
        steps: int,
        guidance: float,
        schedule: ScheduleConfig = _COSINE,
        evaluated: int = 0,
    ) -> OdeTables:
        """Computes the tables.

        Args:
            evaluated: start times at which the estimator is evaluated; 0 for all. Fewer and longer
                steps then cover the same range of times. For example, 3 of 10 times are the times
                0, 3 and 7. Only Euler's method can leave out evaluations.
        """
        device = next(estimator.parameters()).device
        if schedule.method == "rk4":
            times, ends, widths = _rk4_times(steps, schedule)
            stored_steps, weights = list(range(steps)), _RK4
        else:
            times, widths = solver_times(steps, schedule)
            count = evaluated or steps
            stored_steps, weights = [round(step * steps / count) for step in range(count)], EULER
            if count < steps:
                ends = torch.cat((times[stored_steps[1:]], (times + widths)[-1:]))
                times = times[stored_steps]
                widths = ends - times
            ends = times + widths
        intervals = zip(times[:, None].to(device), ends[:, None].to(device), strict=True)
        modulation = [estimator.modulation(t, end) for t, end in intervals]
        return cls(widths.tolist(), modulation, guidance, stored_steps, weights)

    def advance(self, step: int, x: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
        """Advances the state x (B, ...) by one step of Euler's method.

        `velocity` has shape (2B, ...) with guidance, conditional rows first, else (B, ...).
        """
        return x + self.widths[step] * self._guided(velocity)

    def advance_state(self, evaluation: int, state: OdeState, velocity: torch.Tensor) -> OdeState:
        """Advances the state of an ODE to the point of the next evaluation, by any method.

        Args:
            state: state whose first tensor (B, ...) is the point of the evaluation. Before the
                first evaluation of a step it has no other tensors.
        """
        step, stage = divmod(evaluation, len(self.weights))
        if len(self.weights) == 1:
            return (self.advance(step, state[0], velocity),)
        start, velocities = state[:2][-1], (*state[2:], self._guided(velocity))
        first, *weights = self.weights[stage]
        slope = first * velocities[0]
        for weight, earlier in zip(weights, velocities[1:], strict=True):
            slope = torch.add(slope, earlier, alpha=weight)
        point = start + self.widths[step] * slope
        return (point,) if stage == len(self.weights) - 1 else (point, start, *velocities)

    def _guided(self, velocity: torch.Tensor) -> torch.Tensor:
        if not self.guidance:
            return velocity
        conditional, unconditional = velocity.chunk(2)
        return (1 + self.guidance) * conditional - self.guidance * unconditional

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows of a state x (B, ...): x twice, (2B, ...), with guidance; else x."""
        return torch.cat((x, x)) if self.guidance else x

    def guided(self, *conditions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Adds unconditional rows to conditions (B, ...) if there is guidance.

        All conditions of an unconditional row are zero. As in the public code, this includes the
        speaker vector: it is zero itself, and not the projection of a zero embedding.
        """
        if not self.guidance:
            return conditions
        return tuple(torch.cat((value, torch.zeros_like(value))) for value in conditions)


class EulerSolver:
    """Solver that integrates one estimator over a fixed schedule, by the method of the schedule."""

    def __init__(
        self, estimator: Estimator, steps: int, guidance: float, schedule: ScheduleConfig = _COSINE
    ) -> None:
        self._estimator = estimator
        self.tables = OdeTables.of(estimator, steps, guidance, schedule)

    @torch.inference_mode()
    def solve(
        self,
        noise: torch.Tensor,
        mu: torch.Tensor,
        spk: torch.Tensor,
        cond: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Integrates noise (B, bands, T) to mel, for whole sequences that start with their prompt.

        Args:
            mask: (T, T) attention mask, True where allowed; None for full attention.
        """
        conditions = self._estimator.project_conditions(*self.tables.guided(mu, spk, cond))
        bias = None if mask is None else attention_bias(mask)
        rope = self._estimator.rope(torch.arange(noise.shape[2], device=noise.device))
        state: OdeState = (noise,)
        for evaluation, modulation in enumerate(self.tables.modulation):
            velocity = self._estimator.velocity(
                self.tables.rows(state[0]), conditions, modulation, bias, rope=rope
            )
            state = self.tables.advance_state(evaluation, state, velocity)
        return state[0]
