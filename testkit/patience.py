"""Waits of tests: a busy machine stalls for a minute, and no test is about speed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

# `make faults` sets the variable, because most of its tests wait in vain.
PATIENCE_SECONDS = float(os.environ.get("TOKEN2WAV_PATIENCE_S", "300"))


def until(condition: Callable[[], object], *, pause_s: float = 0.02) -> None:
    """Waits until a condition is true, and fails after the patience of a test."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(pause_s)


def run_elsewhere(work: Callable[[], object]) -> None:
    """Runs something in another thread, and waits for it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
