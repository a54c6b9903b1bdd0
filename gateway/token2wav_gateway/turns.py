"""Turns of connections: the gateway parses what clients send for at most half of the time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol

_SHARE = 0.5
# Time that may be parsed without a pause, divided by the share. It is longer than a turn, and short
# enough for a health check to wait several times.
_BURST_S = 0.004
# Virtual time by which a connection that was quiet goes before the others.
_CREDIT_S = 0.01


class Turn(Protocol):
    """A connection that takes turns.

    Attributes:
        turn: virtual time of its next turn in seconds, 0 for a new connection.
    """

    turn: float

    def read(self) -> None:
        """Parses the bytes that have arrived."""


class Turns:
    """Order in which connections parse the bytes that have arrived.

    Parsing a kilobyte of tiny pieces takes a hundred times as long as parsing a kilobyte of a
    recording, and the event loop does nothing else meanwhile. So a client with cheap bytes, such as
    chunks of one byte or empty pings, could stop the gateway. Here the connection that has taken
    the least time goes first (start-time fair queueing), and all of them together pause as long as
    they parsed. A connection that sends little never waits for more than a few milliseconds.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: list[tuple[float, int, Turn]] = []
        self._order = itertools.count()
        self._now = 0.0  # virtual time
        self._paid_at = 0.0  # time after which nothing remains of the pauses
        self._pause: asyncio.TimerHandle | None = None

    def join(self, connection: Turn) -> None:
        """Takes a connection in line. It reads at once if no pause is due."""
        connection.turn = max(connection.turn, self._now - _CREDIT_S)
        heapq.heappush(self._waiting, (connection.turn, next(self._order), connection))
        if self._pause is None:
            self._serve()

    def _serve(self) -> None:
        self._pause = None
        while self._waiting:
            started = self._clock()
            if self._paid_at - started > _BURST_S:
                loop = asyncio.get_running_loop()
                self._pause = loop.call_later(self._paid_at - started, self._serve)
                return
            turn, _, connection = heapq.heappop(self._waiting)
            self._now = max(self._now, turn)
            connection.read()
            seconds = self._clock() - started
            connection.turn += seconds
            self._paid_at = max(self._paid_at, started) + seconds / _SHARE
