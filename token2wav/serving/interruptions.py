"""Interruptions of a batch: turns that its worker takes between two ODE steps."""

from __future__ import annotations

from collections.abc import Callable

from token2wav.execution.step_boundary import interruption


class Interruptions:
    """Interruptions of one batch. Call it at every boundary between two ODE steps.

    Args:
        interrupt: takes one turn, if the scheduler finds one, and returns whether it did. Its
            argument is `seconds`.

    Attributes:
        seconds: total time of the interruptions.
    """

    def __init__(self, interrupt: Callable[[float], bool], clock: Callable[[], float]) -> None:
        self._interrupt, self._clock = interrupt, clock
        self.seconds = 0.0

    def __call__(self) -> None:
        with interruption():
            going = True
            while going:
                start = self._clock()
                going = self._interrupt(self.seconds)
                self.seconds += self._clock() - start
