"""Calls something now and then, for what nobody asks for: Triton never says that a client has gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_LONGEST_S = 1.0


class Ticker:
    """Runs `call` from a thread of its own, now and then, until `stop`.

    Args:
        call: what drops idle streams.
        idle_seconds: after which a stream is idle; it is dropped at most a quarter of that later.
    """

    def __init__(self, call: Callable[[], None], idle_seconds: float) -> None:
        self._call = call
        self._interval_s = min(_LONGEST_S, idle_seconds / 4)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="token2wav-ticker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._call()
            except Exception:  # the next one has its chance; without any, what is abandoned would stay for ever
                log.exception("looking for idle streams failed")
