"""Choice between wide tiles, which load less, and narrow tiles, which give more programs."""

from __future__ import annotations

import math

ENOUGH_PROGRAMS = 128  # about the number of multiprocessors of a large GPU


def fills_gpu(grid: tuple[int, ...]) -> bool:
    """Returns whether a grid has a program for every multiprocessor of a large GPU."""
    return math.prod(grid) >= ENOUGH_PROGRAMS
