"""Interruptions of a batch: turns that its worker takes between two ODE steps."""

from __future__ import annotations

from collections.abc import Callable

from token2wav.execution.step_boundary import interruption


class Interruptions:
    """Interruptions of one batch. Call it at every boundary between two ODE steps.

    Args:
        interrupt: takes one turn, if the scheduler finds one, and returns its seconds, else None.
            Its argument is `seconds`. It raises nothing, because an exception would end the batch.

    Attributes:
        seconds: total time of the interruptions.
    """

    def __init__(self, interrupt: Callable[[float], float | None]) -> None:
        self._interrupt = interrupt
        self.seconds = 0.0

    def __call__(self) -> None:
        with interruption():
            while (seconds := self._interrupt(self.seconds)) is not None:
                self.seconds += seconds
