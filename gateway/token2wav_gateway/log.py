"""Log of the gateway: no words of clients, and one line a second for each kind of error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_INTERVAL_S = 1.0
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Below these levels, libraries log texts, keys and addresses.
_LEAST_LEVELS = {
    "aiohttp": logging.WARNING,
    "opentelemetry.trace": logging.ERROR,  # which logs a wrong `tracestate`
    "python_multipart": logging.WARNING,
    "uvicorn": logging.INFO,
    "websockets": logging.INFO,
}


class LineLimit(logging.Filter):
    """Filter of a handler that passes one record a second for each kind.

    Records from the same line of code are of one kind, so the number of kinds is bounded. Clients
    can cause errors as fast as they connect, and would otherwise fill the disk. The next record
    that passes says how many were dropped.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._silent_until: dict[tuple[str, int], float] = {}
        self._dropped: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.pathname, record.lineno), self._clock()
        if now < self._silent_until.get(kind, now):
            self._dropped[kind] = self._dropped.get(kind, 0) + 1
            return False
        self._silent_until[kind] = now + _INTERVAL_S
        if dropped := self._dropped.pop(kind, 0):
            record.msg = f"{record.getMessage()} (and {dropped} more of this kind)"
            record.args = None
        return True


def quiet_libraries() -> None:
    """Raises the levels of libraries that would log words of clients, at any level of the root."""
    for name, level in _LEAST_LEVELS.items():
        library = logging.getLogger(name)
        library.setLevel(max(level, library.getEffectiveLevel()))
    logging.getLogger("uvicorn.error").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Drops two kinds of uvicorn's lines.

    The gateway breaks responses off on purpose. The line for a new WebSocket has the whole address,
    in which some clients send a key.
    """
    text = str(record.msg)
    return "without completing response" not in text and '"WebSocket %s"' not in text


def configure_log(level: str) -> None:
    """Starts the log of the command on the standard error stream.

    Args:
        level: `info`, `warning` or `error`.
    """
    logging.basicConfig(level=level.upper(), format=_FORMAT)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LineLimit())
    quiet_libraries()
