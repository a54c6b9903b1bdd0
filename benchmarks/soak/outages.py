"""Outages of a soak: failing servers behind a gateway, and killed processes of a server."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from random import Random

from anyio.from_thread import start_blocking_portal

from benchmarks.soak.crowd import shuffled
from testkit.rigs.failing_proxy import MANNERS, Proxy
from testkit.rigs.serve_command import Serving

# Actions that begin within this time after an outage may fail too, because gRPC connects again
# after at most a second.
_RECOVERY_S = 1.5
_PAUSE_S = (4.0, 12.0)  # between outages of the servers behind a gateway
_OUTAGE_S = (1.0, 5.0)
_STALL_S = (1.0, 18.0)  # time-outs of the gateway begin in the longest ones
_LIFE_S = (8.0, 30.0)  # from the restart of a process to the next kill
_LEFTOVER_S = 30.0  # in which the leftovers of a killed server go


class Outages(threading.Thread, ABC):
    """Thread that makes one outage after the other, until `end`.

    Args:
        kinds: kinds of outages. Each comes once before one comes again.
        pause_s: shortest and longest time between two outages.

    Attributes:
        counts: outages so far, by kind.
        ended: monotonic time of the end of the last outage, infinite during one.
    """

    def __init__(self, kinds: Iterable[str], pause_s: tuple[float, float], random: Random) -> None:
        super().__init__(name="soak-outages", daemon=True)
        self.counts = Counter[str]()
        self.ended = -math.inf
        self._kinds, self._pause_s, self._random = shuffled([*kinds], random), pause_s, random
        self._over = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        while not self._error and not self._over.wait(self._random.uniform(*self._pause_s)):
            self._make(next(self._kinds))

    def end(self) -> None:
        """Waits for the end of the last outage. Raises the error of an outage that did not end."""
        self._over.set()
        self.join()
        if self._error:
            raise self._error

    def since(self, began: float, *, late_s: float = math.inf) -> bool:
        """Returns whether an action that began at a time may have failed by an outage.

        Args:
            late_s: longest time from the end of the outage to the failure, which is now.
        """
        return self.ended + _RECOVERY_S > began and time.monotonic() < self.ended + late_s

    @abstractmethod
    def _outage(self, kind: str) -> None:
        """Makes one outage, and returns at its end."""

    def _make(self, kind: str) -> None:
        self.counts[kind] += 1
        self.ended = math.inf
        try:
            self._outage(kind)
        except Exception as error:  # `end` raises it
            self._error = error
        else:
            self.ended = time.monotonic()


class ProxyOutages(Outages):
    """Outages of servers behind proxies, which are closed at the end of the context.

    Args:
        targets: ports of the servers, by their names.

    Attributes:
        ports: ports of the proxies, by the names of the servers.
    """

    def __init__(self, targets: dict[str, int], random: Random) -> None:
        proxies = {server: Proxy(port) for server, port in targets.items()}
        self._ways = {
            f"{server} {manner}": (proxy, manner)
            for server, proxy in proxies.items()
            for manner in MANNERS
        }
        super().__init__(self._ways, _PAUSE_S, random)
        self._proxies = [*proxies.values()]
        self.ports = {server: proxy.port for server, proxy in proxies.items()}
        self._event_loop = ExitStack()

    def __enter__(self) -> ProxyOutages:
        self._portal = self._event_loop.enter_context(start_blocking_portal())
        for proxy in self._proxies:
            self._portal.call(proxy.start)
        return self

    def __exit__(self, *error: object) -> None:
        with self._event_loop:
            for proxy in self._proxies:
                self._portal.call(proxy.close)

    def _outage(self, kind: str) -> None:
        proxy, manner = self._ways[kind]
        self._portal.call(proxy.fail, manner)
        self._over.wait(self._random.uniform(*(_STALL_S if manner == "stalls" else _OUTAGE_S)))
        self._portal.call(proxy.start)


class Kills(Outages):
    """Kills of the processes of a running command, each of which ends when the server is ready.

    The last kill is one of the engine, so that the last tritonserver has seen two engines.

    Args:
        seconds: time after which the last kill comes.

    Attributes:
        problems: wrong restarts, and what the killed processes have left.
    """

    def __init__(self, serving: Serving, seconds: float, random: Random) -> None:
        count = len(serving.traces.processes)
        tritonserver, engine, front = 1, count - 1, 2  # the Python front is a process of its own
        self._ways = {
            "engine killed": (engine, signal.SIGKILL, "engine"),
            "engine stopped": (engine, signal.SIGSTOP, "engine"),
            "tritonserver killed": (tritonserver, signal.SIGKILL, "server"),
        }
        if front < engine:
            self._ways["Python front killed"] = (front, signal.SIGKILL, "server")
        super().__init__(self._ways, _LIFE_S, random)
        self.problems: list[str] = []
        self._serving, self._seconds = serving, seconds

    def run(self) -> None:
        last = threading.Timer(self._seconds, self._over.set)
        last.start()
        super().run()
        if not self._error:
            self._make("engine killed")

    def end(self) -> None:
        self.join()
        super().end()

    def _outage(self, kind: str) -> None:
        index, number, part = self._ways[kind]
        before = self._serving.traces
        os.kill(before.processes[index], number)
        line = self._serving.wait_for_line("; restarting the ")
        self._serving.wait_for_line("token2wav: ready")
        if f"; restarting the {part}" not in line:
            self.problems.append(f"{kind}: {line}")
        if part == "server":
            left = before.remaining_after(_LEFTOVER_S)
        else:
            left = [f"process {before.engine}"] if Path(f"/proc/{before.engine}").exists() else []
        self.problems += [f"{kind}: left behind: {trace}" for trace in left]
