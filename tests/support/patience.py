"""Waits of tests: a busy machine stalls for a minute, and no test is about speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0


def until(condition: Callable[[], object], pause_s: float = 0.02) -> None:
    """Waits until a condition is true, and fails after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(pause_s)
