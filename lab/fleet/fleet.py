"""Fleet of simulated servers behind a balancer: arrivals, crashes, drains, cold starts, scaling."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lab.fleet.balancer import LeastOpen
from testkit.simulation.server import Events
from token2wav.errors import LimitError

COLD_START_S = 60.0  # from the decision to start a server until it accepts streams
GRACE_S = 35.0  # of a server that stops: 5 s of notice and 30 s for its streams
VANISHED_S = 5.0  # until the balancer notices that a host has left the network
CONNECT_S = 2.0  # until the balancer gives up a connection to such a host (`timeout connect`)
_PAUSE_S, _JITTER_S = 0.5, 0.5  # of a client before its first retry (`token2wav_client`)


class Listener(Protocol):
    """Listener of one utterance, as the fleet sees it.

    Attributes:
        started: time of the first audio; None before it, and in the light model.
        silent_s: silence after the first audio, summed.
        resent: times that the utterance was sent again.
    """

    silent_s: float
    resent: int

    @property
    def started(self) -> float | None: ...
    def connect(self, server: Any) -> None: ...
    def feed(self) -> None: ...
    def lose(self) -> None: ...


class Model(Protocol):
    """Model of servers and listeners: the full one, or the light one of `fleet/light.py`."""

    def server(self, events: Events) -> Any: ...
    def listener(
        self, seconds: float, events: Events, on_over: Callable[[Any], None]
    ) -> Listener: ...


@dataclass(eq=False)
class Replica:
    """Server of a fleet, with the records of the fleet about it.

    Attributes:
        open: open listeners, with `stream_s` at the time of their opening.
        draining: whether the server stops when its streams have ended.
        stream_s: integral of the open streams over time.
    """

    server: Any
    open: dict[Listener, float] = field(default_factory=dict)
    alive: bool = True
    draining: bool = False
    accepting: bool = False
    stream_s: float = 0.0
    changed: float = 0.0

    def advance(self, now: float) -> None:
        self.stream_s += len(self.open) * (now - self.changed)
        self.changed = now


@dataclass(frozen=True)
class Outcome:
    """Outcome of one utterance.

    Attributes:
        begun: time of the request.
        first_s: time from the request to the first audio; 0 for the light model.
        silent_s: silence after the first audio, summed; infinite if it never arrived in full.
        open_s: time for which its last server had it open.
        load: mean number of open streams at this server in this time.
    """

    begun: float
    first_s: float
    silent_s: float
    open_s: float
    load: float
    resent: int


class Fleet:
    """Servers, balancer and listeners of one simulation.

    Args:
        servers: servers that accept streams from the start.
        on_over: called with every utterance that is over; None to collect them in `outcomes`.

    Attributes:
        outcomes: utterances that are over, in the order of their ends.
    """

    def __init__(
        self,
        model: Model,
        events: Events,
        servers: int,
        on_over: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.events, self.random = events, np.random.default_rng(0)
        self.outcomes: list[Outcome] = []
        self._record = on_over or self.outcomes.append
        self.replicas: list[Replica] = []
        self._model = model
        self._balancer = LeastOpen[Replica]()
        self._listeners: dict[Listener, tuple[float, Replica]] = {}
        self._begun: dict[Listener, float] = {}
        for _ in range(servers):
            self.start_server(0.0)

    @property
    def accepting(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.accepting]

    @property
    def open_streams(self) -> int:
        return sum(len(replica.open) for replica in self.replicas)

    def start_server(self, cold_start_s: float = COLD_START_S) -> Replica:
        """Starts a server, which accepts streams after its cold start."""
        replica = Replica(self._model.server(self.events), changed=self.events.now)
        self.replicas.append(replica)

        def ready() -> None:
            if replica.alive:
                replica.accepting = True
                self._balancer.add(replica)

        self.events.at(self.events.now + cold_start_s, ready) if cold_start_s else ready()
        return replica

    def speak(self, seconds: float) -> None:
        """Begins an utterance now."""
        listener = self._model.listener(seconds, self.events, self._over)
        self._begun[listener] = self.events.now
        self._connect(listener)
        listener.feed()

    def crash(self, replica: Replica, notice_s: float = 0.0) -> int:
        """Ends a server at once. Its listeners send their utterances again.

        Args:
            notice_s: time until listeners and balancer notice.

        Returns:
            The number of streams that are lost.
        """
        replica.alive = False
        replica.server.crash()
        lost = list(replica.open)

        def noticed() -> None:
            self._withdraw(replica)
            for listener in list(replica.open):
                self._lose(listener)

        self.events.at(self.events.now + notice_s, noticed)
        return len(lost)

    def drain(self, replica: Replica, grace_s: float = GRACE_S) -> None:
        """Gives a server no new streams, and stops it after the grace period."""
        replica.draining = True
        self._withdraw(replica)
        self.events.at(self.events.now + grace_s, lambda: self._stop(replica))

    def _stop(self, replica: Replica) -> None:
        if replica.alive:
            self.crash(replica)

    def _withdraw(self, replica: Replica) -> None:
        if replica.accepting:
            replica.accepting = False
            self._balancer.remove(replica)

    def _connect(self, listener: Listener, avoided: Replica | None = None) -> None:
        replica = self._balancer.open()
        if replica is not None and replica is avoided:
            replica = self._balancer.open()
            self._balancer.close(avoided)
        if replica is None:
            self._fail(listener)
            return
        if not replica.alive:  # the balancer has not noticed yet, and then tries another server
            self._balancer.close(replica)
            self.events.at(self.events.now + CONNECT_S, lambda: self._connect(listener, replica))
            return
        try:
            listener.connect(replica.server)
        except LimitError:
            self._balancer.close(replica)
            self._fail(listener)
            return
        replica.advance(self.events.now)
        replica.open[listener] = replica.stream_s
        self._listeners[listener] = (self.events.now, replica)

    def _lose(self, listener: Listener) -> None:
        _, replica = self._listeners.pop(listener)
        del replica.open[listener]
        self._balancer.close(replica)
        listener.lose()
        pause_s = _PAUSE_S + float(self.random.uniform(0, _JITTER_S))
        self.events.at(self.events.now + pause_s, lambda: self._connect(listener))

    def _fail(self, listener: Listener) -> None:
        self._record(Outcome(self._begun.pop(listener), 0.0, math.inf, 0.0, 0.0, listener.resent))

    def _over(self, listener: Listener) -> None:
        opened, replica = self._listeners.pop(listener)
        replica.advance(self.events.now)
        stream_s = replica.stream_s - replica.open.pop(listener)
        self._balancer.close(replica)
        open_s = self.events.now - opened
        load = stream_s / open_s if open_s else float(len(replica.open) + 1)
        begun = self._begun.pop(listener)
        started = listener.started
        first_s = 0.0 if started is None else started - begun
        self._record(Outcome(begun, first_s, listener.silent_s, open_s, load, listener.resent))


@dataclass(frozen=True)
class Autoscaler:
    """Rule of Kubernetes' HorizontalPodAutoscaler, with the settings in `deploy/kubernetes`.

    Attributes:
        target: open streams for each server that the rule aims at.
        lag_s: age of the open streams that the rule reads: scrapes, and the adapter's own interval.
    """

    target: float
    least: int = 2
    most: int = 16
    every_s: float = 15.0
    lag_s: float = 30.0
    tolerance: float = 0.1
    down_after_s: float = 600.0
    down_every_s: float = 120.0

    def run(self, fleet: Fleet, until: float, cold_start_s: float = COLD_START_S) -> None:
        """Scales a fleet from now on, up to a time."""
        events = fleet.events
        readings = deque([(events.now, fleet.open_streams)])
        wishes: deque[tuple[float, int]] = deque()  # recent results of the rule
        changes: deque[tuple[float, int]] = deque()  # recent numbers of servers
        last_down = -math.inf

        def look() -> None:
            nonlocal last_down
            now = events.now
            readings.append((now, fleet.open_streams))
            while len(readings) > 1 and readings[1][0] <= now - self.lag_s:
                readings.popleft()
            servers = [
                replica for replica in fleet.replicas if replica.alive and not replica.draining
            ]
            count = len(servers)
            wish = self.wanted(readings[0][1], count)
            wishes.append((now, wish))
            while wishes[0][0] < now - self.down_after_s:
                wishes.popleft()
            changes.append((now, count))
            while changes[0][0] < now - 60.0:
                changes.popleft()
            if wish > count:
                wish = min(wish, 2 * min(number for _, number in changes))  # 100 % in 60 s
                for _ in range(wish - count):
                    fleet.start_server(cold_start_s)
            elif (
                max(number for _, number in wishes) < count and now - last_down >= self.down_every_s
            ):
                last_down = now
                ready = [replica for replica in servers if replica.accepting]
                if len(ready) > self.least:
                    fleet.drain(ready[-1])
            if now + self.every_s <= until:
                events.at(now + self.every_s, look)

        events.at(events.now + self.every_s, look)

    def wanted(self, open_streams: int, servers: int) -> int:
        """Returns the number of servers that the rule wants for some open streams."""
        ratio = open_streams / (servers * self.target)
        if abs(ratio - 1) <= self.tolerance:
            return servers
        return min(self.most, max(self.least, math.ceil(ratio * servers)))


def poisson(
    random: np.random.Generator, rate: Callable[[float], float], most: float
) -> Iterator[float]:
    """Yields random times whose rate changes over time, at most `most` a second."""
    now = 0.0
    while True:
        for gap, lot in zip(random.exponential(1 / most, 1024), random.random(1024), strict=True):
            now += float(gap)
            if lot * most <= rate(now):
                yield now


def bursts(random: np.random.Generator, rate: float, mean: float = 8.0) -> Iterator[float]:
    """Yields times in bursts. A burst has a geometric number of utterances, which begin within 1 s.

    Args:
        rate: mean number of utterances in a second.
    """
    times: list[float] = []
    for start in poisson(random, lambda _: rate / mean, rate / mean):
        due = sorted(time for time in times if time <= start)
        times = [time for time in times if time > start]
        yield from due
        times += (start + random.random(int(random.geometric(1 / mean)))).tolist()


def lengths(random: np.random.Generator) -> Iterator[float]:
    """Yields lengths of utterances in seconds, drawn from the statistics of LJ Speech.

    Its page (keithito.com/LJ-Speech-Dataset) gives a least length of 1.11 s, a mean of 6.57 s and a
    greatest length of 10.10 s. A triangular distribution with these three has its mode at 8.50 s.
    """
    least, mean, most = LJ_SPEECH
    while True:
        yield from random.triangular(least, 3 * mean - least - most, most, 1024).tolist()


LJ_SPEECH = (1.11, 6.57, 10.10)  # least, mean and greatest length of a clip, in seconds


def drive(fleet: Fleet, times: Iterator[float], seconds: Iterator[float], until: float) -> None:
    """Begins utterances at times, up to `until`."""
    origin = fleet.events.now

    def begin(at: float) -> None:
        fleet.speak(next(seconds))
        plan()

    def plan() -> None:
        at = next(times)
        if at < until:
            fleet.events.at(origin + at, lambda: begin(at))

    plan()
