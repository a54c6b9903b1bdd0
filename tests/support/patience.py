"""Waits of tests: a busy machine stalls for a minute, and no test is about speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0


def until(
    condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS, pause_s: float = 0.02
) -> None:
    """Waits until a condition is true, and fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(pause_s)
