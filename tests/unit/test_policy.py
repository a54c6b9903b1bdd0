"""Who runs next: rules one by one, then whole days of a server in no time, with a clock of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from token2wav.policy import RESERVE_SECONDS, Policy, Ready

TOKENS_PER_SECOND = 25
HOP, LOOKAHEAD = 25, 3
BUFFER = 0.3
VOCODER_HOLDS = 0.16  # seconds of audio that need what follows


def heard(owner: str, plays_until: float, tokens: int = 25, since: float = 0.0) -> Ready[str]:
    return Ready(owner, since, plays_until, tokens)


def fresh(owner: str, since: float, tokens: int = 25) -> Ready[str]:
    return Ready(owner, since, None, tokens)


def first_batch(chunks: list[Ready[str]], most: int = 8, now: float = 0.0) -> str:
    return "".join(chunk.owner for chunk in Policy[str](most).next_batch(chunks, now))


@pytest.mark.parametrize(
    ("chunks", "batch"),
    [
        ([], ""),
        ([heard("a", 9), heard("b", 8)], "ba"),  # by the end of their audio
        ([heard("a", 9), fresh("b", 2), fresh("c", 1)], "cb"),  # first chunks go first, and what has time waits
        ([fresh("a", 0), heard("b", RESERVE_SECONDS / 2), heard("c", 5)], "ba"),  # unless somebody would fall silent
        ([fresh("a", 0, 25), fresh("b", 1, 40), fresh("c", 2, 20)], "ac"),  # a short one does not wait for a long one
        ([heard("a", 5, 100), heard("b", 6, 25)], "ab"),
    ],
)
def test_who_comes_first_and_who_rides_along(chunks: list[Ready[str]], batch: str) -> None:
    assert first_batch(chunks) == batch


def test_a_batch_is_bounded() -> None:
    assert first_batch([fresh("a", 3), fresh("b", 1), fresh("c", 2)], most=2) == "bc"


@pytest.mark.parametrize(("lanes", "batch"), [(1, "abcde"), (2, "abc"), (4, "ab"), (9, "a")])
def test_idle_lanes_share_what_is_there(lanes: int, batch: str) -> None:
    chunks = [fresh(owner, since) for since, owner in enumerate("abcde")]
    assert "".join(chunk.owner for chunk in Policy[str](8).next_batch(chunks, 0.0, lanes)) == batch


def test_every_fourth_batch_goes_by_waiting_time() -> None:
    policy, old = Policy[str](1), heard("old", 1000.0, since=-50.0)
    heads = [policy.next_batch([old, fresh("new", float(turn))], float(turn))[0].owner for turn in range(8)]
    assert heads == ["new", "new", "new", "old"] * 2


@dataclass(eq=False)
class Listener:
    """A stream whose tokens arrive at 25 a second; its player starts a moment after the first audio."""

    arrives: float
    tokens: int = 0
    plays_until: float | None = None
    gaps: list[float] = field(default_factory=list)
    first: float = 0.0

    @property
    def ready_at(self) -> float:
        return self.arrives + (self.tokens + HOP + LOOKAHEAD) / TOKENS_PER_SECOND

    def take(self, now: float) -> None:
        held_back = 0.0
        if self.plays_until is None:
            self.first, self.plays_until, held_back = now - self.ready_at, now + BUFFER, VOCODER_HOLDS
        else:
            self.gaps.append(max(0.0, now - self.plays_until))
        self.plays_until = max(self.plays_until, now) + HOP / TOKENS_PER_SECOND - held_back
        self.tokens += HOP


def replay(arrivals: list[float], seconds: float, most: int, fixed: float, per_token: float) -> list[Listener]:
    """Runs a server whose batches take `fixed` plus `per_token` for every token in them."""
    listeners = [Listener(at) for at in arrivals]
    policy: Policy[Listener] = Policy(most)
    now = 0.0
    while now < seconds:
        waiting = [Ready(each, each.ready_at, each.plays_until, HOP) for each in listeners if each.ready_at <= now]
        batch = policy.next_batch(waiting, now)
        if not batch:
            now = min(listener.ready_at for listener in listeners)
            continue
        now += fixed + per_token * sum(chunk.tokens for chunk in batch)
        for chunk in batch:
            chunk.owner.take(now)
    return listeners


def poisson(count: int, mean_gap: float, seed: int) -> list[float]:
    generator, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at += generator.expovariate(1 / mean_gap)
        arrivals.append(at)
    return arrivals


FULL_LOAD = 1 / (32 * TOKENS_PER_SECOND)  # seconds per token at which 32 streams are all that can be served


@pytest.mark.parametrize("seed", range(4))
def test_playback_is_unbroken_and_first_audio_fast_at_70_percent_load(seed: int) -> None:
    listeners = replay(poisson(32, 0.1, seed), 60.0, most=8, fixed=0.004, per_token=0.7 * FULL_LOAD)
    assert max(gap for listener in listeners for gap in listener.gaps) == 0
    assert max(listener.first for listener in listeners) < 0.5


def test_overload_starves_nobody() -> None:
    listeners = replay(poisson(32, 0.5, 0), 60.0, most=8, fixed=0.004, per_token=2 * FULL_LOAD)
    progress = [listener.tokens / (60.0 - listener.arrives) for listener in listeners]
    assert max(listener.first for listener in listeners) < 8
    assert min(progress) > 0.6 * max(progress)


def test_a_flood_of_newcomers_does_not_silence_those_who_listen() -> None:
    listeners = replay([0.0] + [5 + 0.001 * i for i in range(60)], 9.0, most=8, fixed=0.01, per_token=0.0005)
    assert max(listeners[0].gaps) == 0
    assert all(listener.plays_until is not None for listener in listeners)
