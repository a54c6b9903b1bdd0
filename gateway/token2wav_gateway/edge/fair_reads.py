"""Fair reads: the gateway reads input of clients for at most half of the time."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, Protocol, TypeVar

_SHARE = 0.5
# Time that may be worked without a pause, divided by the share. It is longer than a turn, and short
# enough for a health check to wait several times.
_BURST_S = 0.004
# Virtual time by which a connection that was quiet goes before the others.
_CREDIT_S = 0.01

_ResultT = TypeVar("_ResultT")


class FairConnection(Protocol):
    """A connection that takes turns.

    Attributes:
        turn: virtual time of its next turn in seconds, 0 for a new connection.
    """

    turn: float


class FairReads:
    """Order in which connections parse the bytes that have arrived, and handle their messages.

    Parsing a kilobyte of tiny pieces takes a hundred times as long as parsing a kilobyte of a
    recording, and the event loop does nothing else meanwhile. So a client with cheap bytes, such as
    chunks of one byte or empty pings, could stop the gateway, and so could one with small messages
    that need much work. Here the connection that has taken the least time goes first (start-time
    fair queueing), and all connections together pause as long as they worked. A connection that
    sends little never waits for more than a few milliseconds.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: list[tuple[float, int, FairConnection, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0  # virtual time
        self._paid_at = 0.0  # time after which nothing remains of the pauses
        self._next: asyncio.Handle | None = None
        self._handling = False  # a task has the turn
        # Variables of a task that ends its turn must not reach the next connection.
        self._context = contextvars.Context()

    def join(self, connection: FairConnection, begin: Callable[[], None]) -> None:
        """Takes a connection in line, and calls `begin` in its turn: at once if no pause is due."""
        connection.turn = max(connection.turn, self._now - _CREDIT_S)
        heapq.heappush(self._waiting, (connection.turn, next(self._order), connection, begin))
        if self._next is None and not self._handling:
            self._serve()

    @coroutine
    def run(
        self, connection: FairConnection, work: Coroutine[Any, Any, _ResultT]
    ) -> Generator[Any, None, _ResultT]:
        """Runs work for a message of a connection. It takes a turn whenever it goes on."""
        loop, cancelled = asyncio.get_running_loop(), None
        while True:
            turn = loop.create_future()
            try:
                if cancelled is None:
                    self.join(connection, partial(self._give, turn))
                    yield from turn
            except BaseException as error:
                cancelled = error
            started = self._clock()
            try:
                step = work.send(None) if cancelled is None else work.throw(cancelled)
            except StopIteration as end:
                result: _ResultT = end.value
                return result
            finally:
                self._charge(connection, started)
                self._take_back(turn)
            cancelled = None
            try:
                yield step
            except BaseException as error:
                cancelled = error

    def _serve(self) -> None:
        self._next = None
        while self._waiting and not self._handling:
            started = self._clock()
            if self._paid_at - started > _BURST_S:
                loop, pause_s = asyncio.get_running_loop(), self._paid_at - started
                self._next = loop.call_later(pause_s, self._serve, context=self._context)
                return
            turn, _, connection, begin = heapq.heappop(self._waiting)
            self._now = max(self._now, turn)
            begin()
            self._charge(connection, started)

    def _charge(self, connection: FairConnection, started: float) -> None:
        seconds = self._clock() - started
        connection.turn += seconds
        self._paid_at = max(self._paid_at, started) + seconds / _SHARE

    def _give(self, turn: asyncio.Future[None]) -> None:
        """Gives a task its turn, unless the task was cancelled."""
        if not turn.done():
            turn.set_result(None)
            self._handling = True

    def _take_back(self, turn: asyncio.Future[None]) -> None:
        """Ends the turn of a task, or its wait for one."""
        if turn.cancel() or turn.cancelled():
            return
        self._handling = False
        if self._waiting and self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.call_soon(self._serve, context=self._context)
