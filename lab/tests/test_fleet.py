"""Fleet on simulated time: costs, gaps, crashes, drains and balancing, with figures by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from lab.fleet.balancer import LeastOpen
from lab.fleet.costs import fit
from lab.fleet.fleet import (
    CONNECT_S,
    LJ_SPEECH,
    Autoscaler,
    Fleet,
    bursts,
    drive,
    lengths,
    poisson,
)
from lab.fleet.models import FullModel, LightModel
from testkit.models.tiny_model import TINY
from testkit.simulation.listener import Listener
from testkit.simulation.server import ChunkWork, Costs, Events, ServerKind, SimulatedServer
from token2wav import StreamConfig
from token2wav.config import LimitConfig
from token2wav.families.cosyvoice3 import CosyVoice3Config

CONFIG = CosyVoice3Config.read(TINY)
# A first chunk of 25 tokens also computes the last 25 tokens of the prompt, so it takes 0.1 s.
COSTS = Costs(batch_s=0.05, token_s=0.001)
BUFFER_S = 0.2


def kind_of(costs: Costs = COSTS, **limits: int) -> ServerKind:
    config = LimitConfig(player_buffer_seconds=BUFFER_S, **limits)
    return ServerKind(CONFIG, costs, StreamConfig(first_tokens=0), config)


WITHHELD_S = kind_of().withheld / CONFIG.sample_rate


def hear(
    kind: ServerKind, *utterances: Sequence[tuple[float, int]]
) -> tuple[list[Listener], SimulatedServer]:
    events = Events()
    server = SimulatedServer(kind, events)
    listeners = [Listener(coming, events, BUFFER_S) for coming in utterances]
    for listener in listeners:
        listener.connect(server)
        listener.feed()
    events.run()
    return listeners, server


AT_ONCE, SOON = [(0.0, 25)], [(0.01, 25)]


@pytest.mark.parametrize(
    ("kind", "utterances", "first_s"),
    [
        (kind_of(), [AT_ONCE], [0.1]),
        (kind_of(), [AT_ONCE, AT_ONCE], [0.15, 0.15]),  # one batch
        (kind_of(), [AT_ONCE, SOON, SOON], [0.1, 0.24, 0.24]),  # the second batch waits
        (kind_of(batch_streams=1), [AT_ONCE] * 3, [0.1, 0.2, 0.3]),
        (kind_of(Costs(0.05, token_s=0.001, open_s=0.01)), [AT_ONCE], [0.11]),
        (kind_of(Costs(0.05, stream_s=0.5)), [AT_ONCE], [0.55]),
        # The first chunk attends to 50 tokens before it.
        (kind_of(Costs(0.05, past_s=0.001)), [AT_ONCE], [0.1]),
        (kind_of(Costs(past_token_s=1e-4)), [AT_ONCE], [0.25]),
    ],
)
def test_first_audio_at_known_costs(
    kind: ServerKind, utterances: list[list[tuple[float, int]]], first_s: list[float]
) -> None:
    listeners, _ = hear(kind, *utterances)
    assert [listener.first_s for listener in listeners] == pytest.approx(first_s)
    assert all(listener.over and not listener.silent_s for listener in listeners)


@pytest.mark.parametrize("late_s", [1.0, 3.0])
def test_gap_of_late_tokens(late_s: float) -> None:
    [listener], server = hear(kind_of(), [(0.0, 28), (late_s, 25)])
    # 25 tokens are heard from 0.1 + 0.2 s on. The rest takes a chunk of 28 tokens.
    ends = 0.1 + BUFFER_S + 1.0 - WITHHELD_S
    assert listener.silent_s == pytest.approx(max(0.0, late_s + 0.078 - ends))
    assert listener.playback.seconds_sent == pytest.approx(53 / 25)
    assert listener.chunks == 2
    assert server.open_streams == 0


def test_two_workers_compute_two_batches_at_the_same_time() -> None:
    kind = ServerKind(CONFIG, COSTS, StreamConfig(first_tokens=0), workers=2)
    listeners, _ = hear(kind, AT_ONCE, AT_ONCE)
    assert [listener.first_s for listener in listeners] == pytest.approx([0.1, 0.1])


def test_past_of_a_window() -> None:
    stream = StreamConfig(left_blocks=2)
    assert [
        ServerKind(CONFIG, COSTS, stream).past_tokens(start) for start in (50, 75, 100, 500)
    ] == [50, 75, 100, 100]
    assert kind_of().past_tokens(500) == 500


OPEN, CLOSE, REMOVE, ADD = "open", "close", "remove", "add"


@pytest.mark.parametrize(
    ("calls", "chosen"),
    [
        ([(OPEN, "")] * 6, "abcabc"),
        ([(OPEN, "")] * 3 + [(CLOSE, "b"), (OPEN, ""), (OPEN, "")], "abcba"),
        # c has one stream less, then all have two, and c was changed last.
        ([(OPEN, "")] * 6 + [(CLOSE, "c"), (OPEN, ""), (OPEN, "")], "abcabcca"),
        ([(REMOVE, "a"), (OPEN, ""), (OPEN, ""), (OPEN, "")], "bcb"),
        ([(OPEN, ""), (REMOVE, "a"), (CLOSE, "a"), (ADD, "a"), (OPEN, "")], "ab"),
        ([(OPEN, "")] * 3 + [(REMOVE, "a"), (CLOSE, "a"), (ADD, "a"), (OPEN, "")], "abca"),
    ],
)
def test_balancer_chooses_the_fewest_open_streams(
    calls: list[tuple[str, str]], chosen: str
) -> None:
    balancer = LeastOpen[str]()
    for server in "abc":
        balancer.add(server)
    servers = [
        balancer.open() if call == OPEN else getattr(balancer, call)(server)
        for call, server in calls
    ]
    assert "".join(server for server in servers if server) == chosen


def test_balancer_without_servers() -> None:
    balancer = LeastOpen[str]()
    balancer.add("a")
    balancer.remove("a")
    assert (balancer.open(), len(balancer)) == (None, 0)


def full(costs: Costs = COSTS) -> FullModel:
    return FullModel(kind_of(costs))


def light(tail_s: float = 0.5, limit: int = 100) -> LightModel:
    return LightModel(tail_s, (10.0, 20.0), (0.0, 1.0), limit, np.random.default_rng(0))


@pytest.mark.parametrize("notice_s", [0.0, 5.0])
@pytest.mark.parametrize("model", [full(), light()], ids=["full", "light"])
def test_crash_loses_the_streams_of_its_server(
    model: FullModel | LightModel, notice_s: float
) -> None:
    fleet = Fleet(model, Events(), servers=2)
    for _ in range(6):
        fleet.speak(8.0)
    fleet.events.run(until=3.0)
    assert [len(replica.open) for replica in fleet.replicas] == [3, 3]
    assert fleet.crash(fleet.replicas[0], notice_s) == 3
    fleet.events.run()
    lost = [outcome for outcome in fleet.outcomes if outcome.resent]
    assert len(fleet.outcomes) == 6
    assert len(lost) == 3
    assert fleet.open_streams == 0
    assert all(outcome.load > 1 for outcome in lost)  # they went to the other server


def test_silence_after_a_crash() -> None:
    """All tokens arrive at once, so that only the crash can cause silence."""
    fleet = Fleet(FullModel(kind_of(), speed=1000.0), Events(), servers=2)
    fleet.speak(8.0)
    fleet.events.run(until=0.2)  # the first chunk has been sent, the second has not
    [listener] = fleet.replicas[0].open
    assert isinstance(listener, Listener)
    assert listener.chunks == 1
    ends = listener.playback.plays_until
    assert ends is not None
    fleet.crash(fleet.replicas[0])
    fleet.events.run(until=0.2 + 1.0)  # the client pauses for 0.5 to 1 s
    [again] = fleet.replicas[1].open
    assert again is listener
    fleet.events.run()
    [outcome] = fleet.outcomes
    assert outcome.resent == 1
    # The first chunk takes 0.1 s again, and the second one 0.1 s.
    assert 0.2 + 0.5 + 0.2 < ends + outcome.silent_s < 0.2 + 1.0 + 0.2 + 0.05
    assert listener.playback.seconds_sent == pytest.approx(8.0)


def test_streams_of_a_vanished_host_are_late() -> None:
    fleet = Fleet(light(tail_s=0.0), Events(), servers=1)
    fleet.crash(fleet.replicas[0], notice_s=5.0)
    fleet.start_server(cold_start_s=1.0)
    fleet.speak(4.0)  # the balancer tries the vanished host first
    fleet.events.run(until=CONNECT_S - 0.01)
    assert fleet.open_streams == 0
    fleet.events.run(until=CONNECT_S + 0.01)
    assert len(fleet.replicas[1].open) == 1
    fleet.events.run()
    [outcome] = fleet.outcomes
    assert (outcome.resent, outcome.open_s) == (0, 4.0 - CONNECT_S)


@pytest.mark.parametrize(("seconds", "resent"), [(2.0, 0), (8.0, 1)])
def test_drain_loses_only_streams_longer_than_the_grace(seconds: float, resent: int) -> None:
    fleet = Fleet(light(), Events(), servers=2)
    fleet.speak(seconds)
    fleet.drain(fleet.replicas[0], grace_s=5.0)
    fleet.speak(1.0)
    assert [len(replica.open) for replica in fleet.replicas] == [1, 1]
    fleet.events.run()
    assert sum(outcome.resent for outcome in fleet.outcomes) == resent
    assert not fleet.replicas[0].alive


def test_refused_streams_count_as_incomplete() -> None:
    fleet = Fleet(light(limit=2), Events(), servers=1)
    for _ in range(3):
        fleet.speak(1.0)
    fleet.events.run()
    assert sorted(outcome.silent_s for outcome in fleet.outcomes) == [0.0, 0.0, math.inf]


def test_load_is_the_mean_number_of_open_streams() -> None:
    fleet = Fleet(light(tail_s=0.0), Events(), servers=1)
    fleet.speak(4.0)
    fleet.speak(1.0)
    fleet.events.run()
    assert [outcome.load for outcome in fleet.outcomes] == pytest.approx([2.0, 5 / 4])
    assert [outcome.open_s for outcome in fleet.outcomes] == [1.0, 4.0]


@pytest.mark.parametrize(("load", "gaps"), [(5.0, 0.0), (15.0, 0.5), (30.0, 1.0)])
def test_gaps_of_the_light_model(load: float, gaps: float) -> None:
    model = light()
    drawn = [model.gap(load) > 0 for _ in range(2000)]
    assert np.mean(drawn) == pytest.approx(gaps, abs=0.04)


@pytest.mark.parametrize(
    ("open_streams", "servers", "wanted"),
    [
        (40, 4, 4),
        (43, 4, 4),  # within the tolerance of a tenth
        (45, 4, 5),
        (10, 4, 2),  # the least number
        (1000, 4, 16),  # the greatest
    ],
)
def test_rule_of_the_autoscaler(open_streams: int, servers: int, wanted: int) -> None:
    assert Autoscaler(target=10).wanted(open_streams, servers) == wanted


def test_autoscaler_starts_servers_after_its_lag_and_their_cold_start() -> None:
    fleet = Fleet(light(), Events(), servers=2)
    Autoscaler(target=2, lag_s=30.0).run(fleet, until=150.0, cold_start_s=60.0)
    for _ in range(8):
        fleet.events.at(1.0, lambda: fleet.speak(300.0))
    seen = []
    for now in (44.0, 46.0, 104.0, 120.0):
        fleet.events.run(until=now)
        seen.append((len(fleet.replicas), len(fleet.accepting)))
    assert seen == [(2, 2), (4, 2), (4, 2), (4, 4)]
    fleet.events.run()  # the rule ends
    assert fleet.events.now == pytest.approx(1.0 + 300.0 + 0.5)


def test_fit_finds_the_costs() -> None:
    costs = Costs(0.01, 1e-4, 7e-5, 4e-6, 5e-8)
    timed = [
        (streams, work, costs.seconds([work] * streams))
        for streams in (1, 16, 64)
        for work in (ChunkWork(50, 0), ChunkWork(25, 125), ChunkWork(100, 325), ChunkWork(25, 825))
    ]
    result = fit(timed)
    assert result.error < 1e-6
    batch = [ChunkWork(75, 300), ChunkWork(10, 20)]
    assert result.costs.seconds(batch) == pytest.approx(costs.seconds(batch))


def test_lengths_have_the_published_mean_and_range() -> None:
    drawn = lengths(np.random.default_rng(0))
    seconds = [next(drawn) for _ in range(20_000)]
    least, mean, most = LJ_SPEECH
    assert least <= min(seconds) < max(seconds) <= most
    assert np.mean(seconds) == pytest.approx(mean, rel=0.01)


@pytest.mark.parametrize(
    "times",
    [
        lambda random: poisson(random, lambda _: 10.0, 10.0),
        lambda random: poisson(random, lambda _: 10.0, 40.0),
        lambda random: bursts(random, 10.0),
    ],
    ids=["steady", "thinned", "bursts"],
)
def test_arrivals_have_their_mean_rate(times: Callable[..., object]) -> None:
    fleet = Fleet(light(tail_s=0.0, limit=10_000), Events(), servers=1)
    arrivals = times(np.random.default_rng(0))
    drive(fleet, arrivals, iter(lambda: 0.5, None), until=2000.0)  # type: ignore[arg-type]
    fleet.events.run()
    begun = [outcome.begun for outcome in fleet.outcomes]
    assert begun == sorted(begun)
    assert len(begun) == pytest.approx(20_000, rel=0.05)
