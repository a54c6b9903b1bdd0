"""Full and light model of a server.

The full model runs the library's scheduler and chunker. The light model only counts open streams,
and draws whether an utterance has a gap from its mean load, by a table that the full model filled.
It simulates thousands of servers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.fleet.fleet import Outcome
from testkit.simulation.listener import Listener
from testkit.simulation.server import Events, ServerKind, SimulatedServer
from token2wav.config.model_config import ModelConfig
from token2wav.errors import LimitError

_MESSAGE_S = 0.2


@dataclass(frozen=True)
class FullModel:
    """Servers of one kind, and listeners with tokens in messages of 0.2 s of speech.

    Attributes:
        speed: pace of the tokens as a multiple of the pace of speech.
    """

    kind: ServerKind
    speed: float = 1.0

    def server(self, events: Events) -> SimulatedServer:
        return SimulatedServer(self.kind, events)

    def listener(self, seconds: float, events: Events, on_over: Callable[[Any], None]) -> Listener:
        coming = messages(self.kind.config, seconds, events.now, self.speed)
        return Listener(coming, events, self.kind.limits.player_buffer_seconds, on_over)


def messages(
    config: ModelConfig, seconds: float, begin: float, speed: float = 1.0
) -> list[tuple[float, int]]:
    """Lists the arrival time and the tokens of each message of an utterance.

    Args:
        begin: time at which the language model begins. It makes the first token in its time.
        speed: pace of the tokens as a multiple of the pace of speech.
    """
    rate = config.token_frame_rate
    tokens = max(1, round(seconds * rate))
    pace, size = speed * rate, max(1, round(_MESSAGE_S * rate))
    return [
        (begin + min(stop, tokens) / pace, min(size, tokens - stop + size))
        for stop in range(size, tokens + size, size)
    ]


class LightServer:
    """Server that only counts its open streams."""

    def __init__(self, limit: int) -> None:
        self.limit, self.open, self.alive = limit, 0, True
        self.stream_s = self.changed = 0.0

    def change(self, by: int, now: float) -> None:
        self.stream_s += self.open * (now - self.changed)
        self.open, self.changed = self.open + by, now

    def crash(self) -> None:
        self.alive = False


class LightListener:
    """Listener whose utterance stays open for its length and a constant tail."""

    __slots__ = (
        "_end",
        "_events",
        "_load_at",
        "_model",
        "_on_over",
        "_opened",
        "resent",
        "server",
        "silent_s",
    )

    def __init__(
        self,
        model: LightModel,
        seconds: float,
        events: Events,
        on_over: Callable[[Any], None],
    ) -> None:
        self._model, self._events, self._on_over = model, events, on_over
        self._end = events.now + seconds + model.tail_s
        self._opened = self._load_at = self.silent_s = 0.0
        self.resent = 0
        self.server: LightServer | None = None

    def connect(self, server: LightServer) -> None:
        if server.open >= server.limit:
            raise LimitError(f"streams: all {server.limit} are in use")
        now = self._events.now
        server.change(1, now)
        if self.resent:  # the player was silent since the server was lost
            silent_s = now - self._opened
            self.silent_s, self._end = self.silent_s + silent_s, self._end + silent_s
        self.server, self._opened, self._load_at = server, now, server.stream_s
        number = self.resent
        self._events.at(self._end, lambda: self._finish(number))

    @property
    def started(self) -> None:
        """The light model has no audio."""

    def feed(self) -> None:
        """Sends no tokens."""

    def lose(self) -> None:
        self.resent += 1
        self._opened, self.server = self._events.now, None

    def _finish(self, number: int) -> None:
        server, now = self.server, self._events.now
        if server is None or number != self.resent or not server.alive:
            return
        server.change(-1, now)
        open_s = now - self._opened
        load = (server.stream_s - self._load_at) / open_s if open_s else 0.0
        self.silent_s += self._model.gap(load)
        self._on_over(self)


@dataclass(frozen=True)
class LightModel:
    """Model of a server by two figures that full runs gave.

    Attributes:
        tail_s: mean time for which a stream is open beyond the length of its audio.
        loads: mean numbers of open streams, rising.
        shares: share of utterances with a gap at each of `loads`.
        limit: most streams of a server.
    """

    tail_s: float
    loads: tuple[float, ...]
    shares: tuple[float, ...]
    limit: int
    random: np.random.Generator

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], tail_s: float, limit: int, width: float) -> LightModel:
        """Fills the table from utterances of full runs.

        Args:
            tail_s: see the class.
            width: streams between two loads of the table.
        """
        bins: dict[int, list[bool]] = {}
        for outcome in outcomes:
            if math.isfinite(outcome.silent_s):
                bins.setdefault(round(outcome.load / width), []).append(outcome.silent_s > 0)
        table = sorted((number * width, sum(gaps) / len(gaps)) for number, gaps in bins.items())
        shares = np.maximum.accumulate([share for _, share in table]).tolist()
        loads = tuple(load for load, _ in table)
        return cls(tail_s, loads, tuple(shares), limit, np.random.default_rng(0))

    def server(self, events: Events) -> LightServer:
        return LightServer(self.limit)

    def listener(
        self, seconds: float, events: Events, on_over: Callable[[Any], None]
    ) -> LightListener:
        return LightListener(self, seconds, events, on_over)

    def gap(self, load: float) -> float:
        """Draws a silence: 1 s, or 0 for an utterance without a gap."""
        index = bisect_right(self.loads, load)  # of the first load above
        if not index:
            return 0.0
        share = self.shares[index - 1]
        if index < len(self.loads):
            part = (load - self.loads[index - 1]) / (self.loads[index] - self.loads[index - 1])
            share += part * (self.shares[index] - share)
        return 1.0 if share and self.random.random() < share else 0.0
