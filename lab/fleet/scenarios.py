"""Scenarios of the fleet simulation: each returns rows for the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.gpu.settings import PACE, Settings
from benchmarks.gpu.streams import BUFFER_S, TOKENS_PER_PUSH
from lab.fleet.costs import measured_streams
from lab.fleet.fleet import (
    COLD_START_S,
    LJ_SPEECH,
    Autoscaler,
    Fleet,
    Outcome,
    drive,
    lengths,
    poisson,
)
from lab.fleet.models import FullModel, LightModel
from testkit.simulation.listener import Listener
from testkit.simulation.server import Events, ServerKind, SimulatedServer

Row = dict[str, Any]
GAPS = 0.001  # largest share of utterances with a gap that counts as held
WARM_S = 20.0  # start of a simulation, in which the servers fill up
MEAN_S = LJ_SPEECH[1]


@dataclass
class Tally:
    """Counts of utterances, without the utterances themselves.

    Attributes:
        since: utterances that begin before this time do not count.
    """

    since: float = WARM_S
    utterances: int = 0
    gaps: int = 0
    refused: int = 0
    resent: int = 0
    load: float = 0.0  # sum of the loads
    open_s: float = 0.0
    silences: list[float] = field(default_factory=list)  # of utterances that were sent again

    def __call__(self, outcome: Outcome) -> None:
        if outcome.begun < self.since:
            return
        self.utterances += 1
        self.gaps += outcome.silent_s > 0
        if math.isinf(outcome.silent_s):
            self.refused += 1
            return
        self.load += outcome.load
        self.open_s += outcome.open_s
        if outcome.resent:
            self.resent += 1
            self.silences.append(outcome.silent_s)

    @property
    def gap_share(self) -> float:
        return self.gaps / max(1, self.utterances)

    @property
    def mean_open_s(self) -> float:
        return self.open_s / max(1, self.utterances - self.refused)


def against_gpu(kind: ServerKind, costs_host_s: float, row: Row) -> Row:
    """Simulates a run of section `streams` of `make gpu-check`, and returns both.

    The utterances begin within 4 s, as in `benchmarks/gpu/streams.py`.
    """
    settings, events, number = Settings(), Events(), row["streams"]
    costs = replace(kind.costs, stream_s=kind.costs.stream_s + costs_host_s)
    limits = replace(kind.limits, streams=number, player_buffer_seconds=BUFFER_S)
    server = SimulatedServer(replace(kind, costs=costs, limits=limits), events, keep_open=False)
    turns = round(PACE * settings.stream_s / TOKENS_PER_PUSH)
    listeners, begins = [], [4.0 * index / number for index in range(number)]
    for begin in begins:
        times = [begin + (turn + 1) * TOKENS_PER_PUSH / PACE for turn in range(turns)]
        listeners.append(Listener([(at, TOKENS_PER_PUSH) for at in times], events, BUFFER_S))
        listeners[-1].connect(server)
        listeners[-1].feed()
    events.run()
    count = kind.config.hops(kind.stream)[0] + kind.config.lookahead_tokens
    needed_s = math.ceil(count / TOKENS_PER_PUSH) * TOKENS_PER_PUSH / PACE
    first_ms = [
        1000 * ((listener.playback.started or 0.0) - begin - needed_s)
        for listener, begin in zip(listeners, begins, strict=True)
    ]
    return {
        "streams": number,
        "host_ms": 1000 * costs_host_s,
        "unbroken": round(fmean(not listener.silent_s for listener in listeners), 4),
        "first_audio_ms": {f"p{q}": round(float(np.percentile(first_ms, q)), 1) for q in (50, 99)},
        "longest_gap_s": round(max(listener.longest_s for listener in listeners), 3),
        "measured": {name: row[name] for name in ("unbroken", "first_audio_ms", "longest_gap_s")},
    }


def gpu_rows(kind: ServerKind) -> tuple[float, list[Row]]:
    """Finds the host's seconds per chunk by one run of a GPU, and simulates all of its runs.

    With these seconds the first audio (median and p99) of the middle run is closest to the measured
    times. The other runs are predicted.
    """
    runs = sorted(measured_streams(), key=lambda run: run["streams"])
    middle = runs[len(runs) // 2]
    tries = [against_gpu(kind, host_s, middle) for host_s in (0.0, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4)]

    def error(row: Row) -> float:
        times, measured = row["first_audio_ms"], row["measured"]["first_audio_ms"]
        return sum(abs(math.log(times[name] / measured[name])) for name in times)

    host_s = min(tries, key=error)["host_ms"] / 1000
    return host_s, [against_gpu(kind, host_s, run) for run in runs]


def closed_loop(model: FullModel, number: int, seconds: float, warm_s: float = WARM_S) -> Row:
    """Simulates a server with a constant number of listeners, without pauses between utterances."""
    events, tally = Events(), Tally(warm_s)
    fleet = Fleet(model, events, 1, on_over=lambda outcome: over(outcome))
    drawn, random = lengths(np.random.default_rng(0)), np.random.default_rng(1)

    def over(outcome: Outcome) -> None:
        tally(outcome)
        if events.now < seconds:
            events.at(events.now, lambda: fleet.speak(next(drawn)))

    for at in random.uniform(0, MEAN_S, number).tolist():
        events.at(at, lambda: fleet.speak(next(drawn)))
    events.run()
    return {"streams": number, "utterances": tally.utterances, "gaps": round(tally.gap_share, 5)}


def capacity(
    model: FullModel, low: int, high: int, seconds: float, warm_s: float = WARM_S
) -> tuple[int, list[Row]]:
    """Finds the largest constant number of streams with `GAPS` at most, within 3 %."""
    rows = []
    while high - low > max(1, 0.03 * low):
        rows.append(closed_loop(model, (low + high) // 2, seconds, warm_s))
        if rows[-1]["gaps"] <= GAPS:
            low = rows[-1]["streams"]
        else:
            high = rows[-1]["streams"]
    return low, sorted(rows, key=lambda row: row["streams"])


Times = Callable[[np.random.Generator, float], Iterator[float]]


def steady(random: np.random.Generator, rate: float) -> Iterator[float]:
    return poisson(random, lambda _: rate, rate)


def open_loop(
    model: FullModel | LightModel,
    servers: int,
    rate: float,
    seconds: float,
    times: Times = steady,
    *,
    act: Callable[[Fleet], None] | None = None,
    keep: list[Outcome] | None = None,
) -> tuple[Row, Tally]:
    """Simulates a fleet with random arrivals.

    Args:
        rate: utterances a second, of all servers together.
        act: called with the fleet before the start, for events such as a crash.
        keep: gets all utterances that count.

    Returns:
        The row: `open` is the mean number of open streams of a server, by Little's law.
    """
    events, tally = Events(), Tally()

    def over(outcome: Outcome) -> None:
        tally(outcome)
        if keep is not None and outcome.begun >= tally.since:
            keep.append(outcome)

    fleet = Fleet(model, events, servers, on_over=over)
    random = np.random.default_rng(1)
    drive(fleet, times(random, rate), lengths(random), seconds)
    if act:
        act(fleet)
    events.run()
    row = {
        "servers": servers,
        "rate": round(rate, 2),
        "open": round(rate * tally.mean_open_s / servers, 1),
        "utterances": tally.utterances,
        "gaps": round(tally.gap_share, 5),
        "refused": tally.refused,
    }
    return row, tally


def share_rows(
    model: LightModel,
    servers: int,
    streams: int,
    seconds: float,
    shares: tuple[float, float],
    times: Times = steady,
    tries: int = 5,
) -> tuple[float, list[Row]]:
    """Finds the largest share of its streams at which a server may be held.

    Args:
        streams: streams that a server holds if their number is constant (`capacity`).
        shares: range of the search; it is halved `tries` times.

    Returns:
        The largest share with `GAPS` at most: mean open streams of a server, of `streams`; 0 if no
        share of the search was held. And the rows of the search.
    """
    low, high = shares
    rows, held = list[Row](), 0.0
    for _ in range(tries):
        middle = (low + high) / 2
        rate = middle * streams * servers / (MEAN_S + model.tail_s)
        row, _ = open_loop(model, servers, rate, seconds, times)
        row["share"] = round(row["open"] / streams, 3)
        rows.append(row)
        if row["gaps"] <= GAPS:
            low, held = middle, max(held, row["share"])
        else:
            high = middle
    return held, sorted(rows, key=lambda row: row["rate"])


def crash_row(
    model: FullModel | LightModel,
    servers: int,
    rate: float,
    seconds: float,
    notice_s: float = 0.0,
) -> Row:
    """Simulates the crash of one server. A new one accepts streams after a cold start.

    `others` is the share of utterances with a gap, of all utterances that began between the crash
    and the end of the cold start and were not lost.
    """
    at, outcomes, lost = WARM_S + 5, list[Outcome](), list[int]()

    def act(fleet: Fleet) -> None:
        def crash() -> None:
            lost.append(fleet.crash(fleet.replicas[0], notice_s))
            fleet.start_server()

        fleet.events.at(at, crash)

    row, tally = open_loop(model, servers, rate, seconds, act=act, keep=outcomes)
    after = [
        outcome.silent_s > 0
        for outcome in outcomes
        if at - MEAN_S <= outcome.begun < at + COLD_START_S and not outcome.resent
    ]
    return {
        **row,
        "notice_s": notice_s,
        "lost": lost[0],
        "silence_s": {
            "median": round(median(tally.silences), 2),
            "worst": round(max(tally.silences), 2),
        },
        "others": round(fmean(after), 5),
    }


def growth_row(model: LightModel, streams: int, share: float, growth: float) -> Row:
    """Simulates an autoscaled fleet whose arrivals grow.

    Args:
        share: target of the autoscaler, as a share of `streams`.
        growth: growth of the arrivals in a minute, of the arrivals at the start.
    """
    begin_s, grow_s, servers = 60.0, 300.0, 4
    end_s = begin_s + grow_s + 60.0
    start = servers * share * streams / (MEAN_S + model.tail_s)

    def rate(now: float) -> float:
        return start * (1 + growth * min(max(0.0, now - begin_s), grow_s) / 60)

    def times(random: np.random.Generator, most: float) -> Iterator[float]:
        return poisson(random, rate, most)

    def act(fleet: Fleet) -> None:
        Autoscaler(share * streams, most=64).run(fleet, end_s)
        fleets.append(fleet)

    fleets: list[Fleet] = []
    row, _ = open_loop(model, servers, rate(math.inf), end_s, times, act=act)
    return {
        "share": share,
        "growth": growth,
        "gaps": row["gaps"],
        "refused": row["refused"],
        "servers": max(len(fleets[0].replicas), servers),
    }


def light_model(outcomes: Sequence[Outcome], streams: int, limit: int) -> LightModel:
    """Makes the light model from the utterances of full runs at loads up to some `streams`."""
    open_s = fmean(
        outcome.open_s for outcome in outcomes if 0.8 * streams <= outcome.load <= streams
    )
    return LightModel.of(outcomes, open_s - MEAN_S, limit, width=max(1.0, streams / 100))
