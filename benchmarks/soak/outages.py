"""Outages of the servers behind the gateway of a soak."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from random import Random
from typing import Any

from testkit.rigs.failing_proxy import MANNERS, Proxy

# Texts that begin within this time after an outage may fail too, because gRPC connects again after
# at most a second.
_RECOVERY_S = 1.5
_PAUSE_S = (4.0, 12.0)  # between outages
_OUTAGE_S = (1.0, 5.0)
_STALL_S = (1.0, 18.0)  # time-outs of the gateway begin in the longest ones


class Outages(threading.Thread):
    """Thread with the proxies of some servers, which makes one outage after the other.

    Args:
        targets: ports of the servers, by their names.

    Attributes:
        ports: ports of the proxies, by the names of the servers.
        counts: counts of the outages so far, by server and manner.
    """

    def __init__(self, targets: dict[str, int], random: Random) -> None:
        super().__init__(name="soak-outages", daemon=True)
        self._proxies = {server: Proxy(port) for server, port in targets.items()}
        self.ports = {server: proxy.port for server, proxy in self._proxies.items()}
        self._ended = -math.inf  # end of the last outage, infinite during one
        self.counts = Counter[str]()
        self._random = random
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()

    def __enter__(self) -> Outages:
        self.start()
        for proxy in self._proxies.values():
            self._in_loop(proxy.start()).result()
        return self

    def __exit__(self, *error: object) -> None:
        for proxy in self._proxies.values():
            self._in_loop(proxy.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()

    def run(self) -> None:
        self._loop.run_forever()

    def begin(self) -> None:
        """Makes outages until `end`."""
        self._making = self._in_loop(self._make())

    def end(self) -> None:
        """Ends the last outage."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._making.result()

    def since(self, began: float) -> bool:
        """Returns whether a text that began at a time may have met an outage."""
        return self._ended + _RECOVERY_S > began

    async def _make(self) -> None:
        kinds: list[tuple[str, str]] = []
        while not await self._over_after(self._random.uniform(*_PAUSE_S)):
            if not kinds:
                kinds = [(server, manner) for server in self._proxies for manner in MANNERS]
                self._random.shuffle(kinds)
            server, manner = kinds.pop()
            self.counts[f"{server} {manner}"] += 1
            self._ended = math.inf
            await self._proxies[server].fail(manner)
            seconds = _STALL_S if manner == "stalls" else _OUTAGE_S
            await self._over_after(self._random.uniform(*seconds))
            await self._proxies[server].start()
            self._ended = time.monotonic()

    async def _over_after(self, seconds: float) -> bool:
        """Waits for a time, or for the end, and returns whether the end has come."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()

    def _in_loop(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
