"""Shows where a model process hangs that does not get ready."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_SECONDS = 60.0
_STDERR = 2


@contextmanager
def told_if_slow(seconds: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Prints once what every thread of this process is doing, if what stands in the block takes longer.

    Args:
        seconds: whoever waits longer on purpose, for a slow disk or a large engine, reads it and goes on waiting.
    """
    faulthandler.dump_traceback_later(seconds, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
