"""Servers under load, on simulated time: gaps in the audio, and waits for the first audio."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from testkit.models.sized import public_configs
from testkit.simulation.listener import Listener
from testkit.simulation.server import Costs, Events, ServerKind, SimulatedServer
from token2wav import StreamConfig
from token2wav.config import LimitConfig
from token2wav.serving.policy import Policy

RATE, MESSAGE = 25, 5  # tokens of a second, and of a message
LIMITS = LimitConfig(streams=128, idle_seconds=1000.0, player_buffer_seconds=0.3)
# seconds per token at which 32 streams are all that can be served
FULL_LOAD = 1 / (32 * RATE)
# Number of workers, seconds for a batch, and seconds for each token in the batch. The first two
# hosts run the `small` model on 2 cores (docs/tuning.md): one worker on both cores, or two workers
# on one core each. The third host is ten times as fast.
Host = tuple[int, float, float]
ONE_WORKER, TWO_WORKERS, FAST = (1, 0.065, 0.0033), (2, 0.082, 0.0042), (1, 0.0065, 0.00033)


class Load:
    """Listeners of a server."""

    def __init__(self, host: Host, most_tokens: int = 25) -> None:
        workers, batch_s, token_s = host
        stream = StreamConfig(first_tokens=0, max_hop_tokens=most_tokens)
        costs = Costs(batch_s=batch_s, token_s=token_s)
        kind = ServerKind(public_configs()["CosyVoice3"], costs, stream, LIMITS, workers, 25)
        self.events = Events()
        self._server = SimulatedServer(kind, self.events)

    def paced(self, at: float) -> Listener:
        """Adds a listener whose tokens arrive at the pace of speech, for 60 s."""
        count = 60 * RATE // MESSAGE
        return self._listener([(at + n * MESSAGE / RATE, MESSAGE) for n in range(1, count + 1)])

    def at_once(self, at: float, seconds: float) -> Listener:
        return self._listener([(at, int(seconds * RATE))])

    def _listener(self, coming: list[tuple[float, int]]) -> Listener:
        listener = Listener(coming, self.events, LIMITS.player_buffer_seconds)
        self.events.at(listener.begins, partial(listener.connect, self._server))
        listener.feed()
        return listener


def poisson(count: int, mean_gap: float, seed: int) -> list[float]:
    generator, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at += generator.expovariate(1 / mean_gap)
        arrivals.append(at)
    return arrivals


def sent(listeners: list[Listener]) -> list[float]:
    return [listener.playback.seconds_sent for listener in listeners]


@pytest.mark.parametrize("seed", range(2))
def test_playback_and_first_audio_at_70_percent_load(seed: int) -> None:
    load = Load((1, 0.004, 0.7 * FULL_LOAD))
    listeners = [load.paced(at) for at in poisson(32, 0.1, seed)]
    load.events.run(60.0)
    assert max(listener.longest_s for listener in listeners) < 0.05
    assert max(listener.first_s for listener in listeners) < 1.7  # of which 1 s for the tokens


def test_overload_starves_nobody() -> None:
    load = Load((1, 0.004, 2 * FULL_LOAD))
    listeners = [load.paced(at) for at in poisson(32, 0.5, 0)]
    load.events.run(60.0)
    assert max(listener.first_s for listener in listeners) < 4
    shares = [
        seconds / (60.0 - listener.begins)
        for seconds, listener in zip(sent(listeners), listeners, strict=True)
    ]
    assert min(shares) > 0.6 * max(shares)


def test_a_flood_of_new_streams_does_not_starve_open_streams() -> None:
    load = Load((1, 0.01, 0.0005))
    first, *flood = [load.paced(at) for at in (0.0, *(5 + 0.001 * i for i in range(60)))]
    load.events.run(9.0)
    assert first.longest_s == 0
    assert all(listener.started for listener in flood)


@pytest.mark.parametrize(
    ("host", "paced", "longest_gap", "bulk_seconds"),
    [
        (ONE_WORKER, 1, 1.2, 450),
        (TWO_WORKERS, 1, 0.3, 580),
        (TWO_WORKERS, 4, 1.5, 430),
        (FAST, 4, 0.0, 3000),
    ],
)
def test_long_utterances_do_not_starve_paced_streams(
    host: Host, paced: int, longest_gap: float, bulk_seconds: float
) -> None:
    """Eight long utterances arrive after 10 s and run for 50 s beside paced listeners."""
    load = Load(host, most_tokens=100)
    listeners = [load.paced(0.37 * number) for number in range(paced)]
    bulk = [load.at_once(10.0, 590) for _ in range(8)]
    load.events.run(60.0)
    assert max(listener.longest_s for listener in listeners) <= longest_gap
    # the long utterances get the rest of the capacity
    assert sum(sent(bulk)) >= bulk_seconds
    assert min(sent(bulk)) > 0.8 * max(sent(bulk))


@pytest.mark.parametrize(
    ("host", "first_s", "share"),
    [(ONE_WORKER, 12.5, 0.6), (TWO_WORKERS, 4, 0.8), (FAST, 0.1, 0.8)],
)
def test_newcomers_pass_a_crowd_of_long_utterances(
    host: Host, first_s: float, share: float
) -> None:
    """60 texts of minutes take all capacity, and every 5 s a client sends a text of 3 s.

    Every second batch has first chunks, of 50 tokens with their prompts. A newcomer waits until the
    crowd has begun, and then for one batch that runs, with 100 tokens of each stream, and for its
    own batch. `first_s` is just above the longest wait of today's policy.
    """
    load = Load(host, most_tokens=100)
    crowd = [load.at_once(0.0, 590) for _ in range(60)]
    newcomers = [load.at_once(10.0 + 5 * number, 3) for number in range(28)]
    load.events.run(180.0)
    (workers, batch_s, token_s), streams = host, LIMITS.batch_streams
    first_batch_s, long_batch_s = (batch_s + streams * count * token_s for count in (50, 100))
    begun_s = max(listener.first_s for listener in crowd)
    assert begun_s <= 2 * math.ceil(len(crowd) / streams) * first_batch_s / workers
    assert max(listener.first_s for listener in newcomers) <= first_s
    for newcomer in newcomers:
        waits_for_crowd_s = max(0.0, begun_s - newcomer.begins)
        assert newcomer.first_s <= waits_for_crowd_s + long_batch_s + first_batch_s
    assert all(listener.over for listener in newcomers)
    assert min(sent(crowd)) > share * max(sent(crowd))


def test_newcomers_do_not_wait_for_long_utterances() -> None:
    load = Load(TWO_WORKERS, most_tokens=100)
    for _ in range(8):
        load.at_once(0.0, 590)
    newcomers = [load.paced(20.0 + 2.3 * number) for number in range(8)]
    load.events.run(60.0)
    assert max(listener.first_s for listener in newcomers) < 1.8  # of which 1 s for the tokens


# As on an H200: 150 ms for 25 tokens of 64 streams, 15 ms for a first chunk with its prompt.
H200 = Costs(batch_s=0.011, token_s=0.139 / 1600, open_s=0.001)
BATCH_AT = 2.0  # time at which 63 streams get the tokens of a chunk


def waited(offset: float) -> float:
    """Returns the seconds that a stream waits for its first audio. Its tokens arrive `offset`
    seconds after those of the others.
    """
    events = Events()
    stream = StreamConfig(first_tokens=0, max_hop_tokens=25)
    kind = ServerKind(public_configs()["CosyVoice3"], H200, stream, LimitConfig(batch_streams=64))
    server = SimulatedServer(kind, events)
    arrivals = [[(0.0, 78), (BATCH_AT, 25), (10.0, 1)]] * 63 + [[(BATCH_AT + offset, 28)]]
    listeners = [Listener(coming, events, buffer_s=0.2) for coming in arrivals]
    for listener in listeners:
        events.at(listener.begins, partial(listener.connect, server))
        listener.feed()
    events.run(8.0)
    assert not any(listener.playback.underruns for listener in listeners)
    return listeners[-1].first_s


def test_a_late_first_chunk_waits_for_two_steps_and_not_for_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets = [0.02 * number for number in range(1, 9)]
    assert max(map(waited, offsets)) < 0.05
    monkeypatch.setattr(Policy, "may_interrupt", lambda *_: False)
    assert max(map(waited, offsets)) > 0.13
