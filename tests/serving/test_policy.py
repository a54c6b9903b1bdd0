"""Policy of the scheduler: single rules, then simulations of a server with its own clock."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from token2wav.serving.policy import AHEAD_SECONDS, RESERVE_SECONDS, Policy

TOKENS_PER_SECOND = 25
HOP, LOOKAHEAD = 25, 3
BUFFER = 0.3
POLL_SECONDS = 0.05  # a worker looks for new chunks at this interval
VOCODER_HOLDS = 0.16  # holdback of the vocoder in seconds of audio


@dataclass(frozen=True)
class Ready:
    """Utterance with a name, as far as the policy reads it."""

    name: str
    ready_since: float = 0.0
    plays_until: float | None = None
    next_tokens: int = 25
    ode_steps: int = 10
    next_provisional: bool = False
    next_divisible: bool = True
    seconds_sent: float = 0.0


def heard(
    name: str, plays_until: float, tokens: int = 25, since: float = 0.0, sent: float = 1.0
) -> Ready:
    return Ready(name, since, plays_until, tokens, seconds_sent=sent)


def fresh(name: str, since: float, tokens: int = 25) -> Ready:
    return Ready(name, since, None, tokens)


def names(batch: list[Ready]) -> str:
    return "".join(utterance.name for utterance in batch)


def first_batch(utterances: list[Ready], most: int = 8, now: float = 0.0) -> str:
    return names(Policy[Ready](most).next_batch(utterances, now))


@pytest.mark.parametrize(
    ("chunks", "batch"),
    [
        ([], ""),
        ([heard("a", 9), heard("b", 8)], "ba"),  # by the end of their audio
        # first chunks go first, and chunks with time to spare wait
        ([heard("a", 9), fresh("b", 2), fresh("c", 1)], "cb"),
        # unless a listener would fall silent
        ([fresh("a", 0), heard("b", RESERVE_SECONDS / 2), heard("c", 5)], "ba"),
        # a short chunk does not wait for a long one
        ([fresh("a", 0, 25), fresh("b", 1, 40), fresh("c", 2, 20)], "ac"),
        ([heard("a", 4, 100), heard("b", 5, 25)], "ab"),
        # streams far ahead do not join a batch, which would get slower
        ([heard("a", 4), heard("b", AHEAD_SECONDS + 1)], "a"),
        ([heard("a", 8), heard("b", 7)], "ba"),  # streams far ahead share a batch of their own
    ],
)
def test_order_of_requests_and_members_of_a_batch(chunks: list[Ready], batch: str) -> None:
    assert first_batch(chunks) == batch


def test_a_batch_is_bounded() -> None:
    assert first_batch([fresh("a", 3), fresh("b", 1), fresh("c", 2)], most=2) == "bc"


@pytest.mark.parametrize(("workers", "batch"), [(1, "abcde"), (2, "abc"), (4, "ab"), (9, "a")])
def test_idle_workers_share_the_ready_chunks(workers: int, batch: str) -> None:
    utterances = [fresh(name, since) for since, name in enumerate("abcde")]
    assert names(Policy[Ready](8).next_batch(utterances, 0.0, workers)) == batch


@pytest.mark.parametrize(
    ("chunks", "batch", "tokens"),
    [
        ("a8 b8 c2", "ab", 8),  # 2 of 8 tokens are more than 3 of 2
        ("a8 b2 c2 d2 e2", "abcde", 2),
        ("a3 b2 c2", "abc", 2),  # a chunk of 3 is cut to 2
        ("a7 b7 c4", "abc", 4),  # 12 tokens either way, 6 and 6 or three times 4
        ("a6 b6 c6 d4 e4 f4 g4 h4", "abc", 6),  # a batch has room for three
        ("a2 b4 c2", "ac", 2),  # no chunk is longer than the first one
        ("a1! b1 c1! d2!", "ac", 0),  # a chunk that cannot be cut runs with chunks of its length
        ("a1 b1! c1", "ac", 1),
        ("", "", 0),
    ],
)
def test_batches_of_equal_length_if_the_model_needs_them(
    chunks: str, batch: str, tokens: int
) -> None:
    utterances = [
        Ready(word[0], 0.0, at / 100, int(word[1]), next_divisible=not word.endswith("!"))
        for at, word in enumerate(chunks.split())
    ]
    policy = Policy[Ready](3 if "h" in chunks else 8, equal_block=1)
    selected = policy.next_batch(utterances, 0.0)
    assert (names(selected), policy.common_tokens(selected)) == (batch, tokens)


@pytest.mark.parametrize(
    ("others", "fair"),
    [
        ([fresh("new", -1.0)], "new"),
        ([fresh("new", -1.0), fresh("old", -2.0)], "old"),
        ([heard("short", -1.0, sent=2.0), heard("relaxed", 4.0, sent=0.5)], "short"),
    ],
)
def test_every_second_batch_begins_with_the_stream_that_has_sent_least(
    others: list[Ready], fair: str
) -> None:
    policy, utterances = Policy[Ready](1), [heard("long", -9.0, since=-50.0, sent=8.0), *others]
    heads = [names(policy.next_batch(utterances, 0.0)) for _ in range(4)]
    assert heads == ["long", fair] * 2


@pytest.mark.parametrize(
    ("in_hand", "tokens", "due", "workers", "batch"),
    [
        (4.5, 100, [9.0], 1, "abcd"),  # 4 s of work
        (3.5, 100, [], 1, "abc"),  # a larger batch would make its own first stream late
        (4.5, 100, [2.5], 1, "ab"),  # a listener would fall silent if its tokens arrive meanwhile
        (4.5, 100, [0.5], 1, "a"),
        (4.5, 25, [0.5], 1, "abcd"),  # as slow as one long chunk
        (4.5, 100, [0.5], 2, "ab"),  # another worker can serve that listener
        (9.0, 100, [2.5], 1, "ab"),
        (9.0, 100, [0.5], 1, ""),  # streams far ahead can wait
        (9.0, 100, [-2.0], 1, ""),
        # no stream waits for another stream that lacks tokens
        (9.0, 100, [-AHEAD_SECONDS], 1, "abcd"),
        (9.0, 100, [0.5], 2, "ab"),
    ],
)
def test_chunks_that_have_time_leave_the_last_worker_to_others(
    in_hand: float, tokens: int, due: list[float], workers: int, batch: str
) -> None:
    policy = Policy[Ready](8)
    policy.record_batch(100, 1.0)
    ready = [heard(name, in_hand, tokens) for name in "abcd"]
    assert names(policy.next_batch(ready, 0.0, workers, due)) == batch


def test_the_speed_of_a_worker_is_learned() -> None:
    policy = Policy[Ready](8)
    utterances = [heard(name, 4.0, 100) for name in "abcd"]
    # for 100 tokens
    for seconds, most in ((2.0, 2), (1.0, 2), (1.0, 2), (1.0, 2), (1.0, 2), (1.0, 3)):
        policy.record_batch(100, seconds)
        assert len(policy.next_batch(utterances, 0.0)) == most


def test_a_batch_that_only_ends_streams_teaches_nothing() -> None:
    policy = Policy[Ready](8)
    policy.record_batch(100, 1.0)
    policy.record_batch(0, 50.0)
    assert len(policy.next_batch([heard(name, 3.5, 100) for name in "abcd"], 0.0)) == 3


@dataclass(eq=False)
class Listener:
    """Stream that gets 25 tokens a second, and a player that starts soon after the first audio.

    Attributes:
        longest: largest hop. The first hop has 25 tokens, and each later hop doubles the previous
            one.
        at_once: whether all tokens arrive together.
        total: tokens of the utterance.
        taken: time of the latest chunk.
    """

    admitted: float
    longest: int = HOP
    at_once: bool = False
    total: float = math.inf
    tokens: int = 0
    taken: float = 0.0
    plays_until: float | None = None
    gaps: list[float] = field(default_factory=list)
    first: float = 0.0
    ode_steps: int = 10
    next_provisional: bool = False
    next_divisible: bool = False

    @property
    def next_tokens(self) -> int:
        return min(self.longest, HOP << len(self.gaps) + 1 if self.plays_until is not None else HOP)

    @property
    def ready_since(self) -> float:
        if self.tokens >= self.total:
            return math.inf
        needed = self.tokens + self.next_tokens + LOOKAHEAD
        arrived = self.admitted + (0 if self.at_once else needed / TOKENS_PER_SECOND)
        return max(arrived, self.taken)

    @property
    def seconds_sent(self) -> float:
        return self.tokens / TOKENS_PER_SECOND

    def take(self, now: float) -> None:
        held_back, hop = 0.0, self.next_tokens
        if self.plays_until is None:
            self.first, self.plays_until, held_back = (
                now - self.ready_since,
                now + BUFFER,
                VOCODER_HOLDS,
            )
        else:
            self.gaps.append(max(0.0, now - self.plays_until))
        self.plays_until = max(self.plays_until, now) + hop / TOKENS_PER_SECOND - held_back
        self.tokens += hop
        self.taken = now


@dataclass
class Running:
    """Batch that a worker is computing."""

    batch: list[Listener]
    until: float


def replay(
    listeners: list[Listener],
    seconds: float,
    most: int,
    fixed: float,
    per_token: float,
    workers: int = 1,
) -> list[Listener]:
    """Simulates a server. A batch takes `fixed` seconds plus `per_token` for each token."""
    policy: Policy[Listener] = Policy(most)
    running: list[Running] = []
    now = 0.0
    while now < seconds:
        for worker in [worker for worker in running if worker.until <= now]:
            running.remove(worker)
            tokens = sum(listener.next_tokens for listener in worker.batch)
            policy.record_batch(tokens, fixed + per_token * tokens)
            for listener in worker.batch:
                listener.take(now)
        while len(running) < workers and (
            batch := policy.next_batch(*waiting(listeners, running, now, workers))
        ):
            tokens = sum(listener.next_tokens for listener in batch)
            running.append(Running(batch, now + fixed + per_token * tokens))
        events = [worker.until for worker in running] + [
            listener.ready_since for listener in listeners if listener.ready_since > now
        ]
        now = min(
            [now + POLL_SECONDS, *events]
            if len(running) < workers
            else [worker.until for worker in running]
        )
    return listeners


def waiting(
    listeners: list[Listener], running: list[Running], now: float, workers: int
) -> tuple[list[Listener], float, int, list[float]]:
    """Returns the arguments with which the scheduler calls the policy."""
    computed = [listener for worker in running for listener in worker.batch]
    idle = [
        listener for listener in listeners if listener.admitted <= now and listener not in computed
    ]
    ready = [listener for listener in idle if listener.ready_since <= now]
    awaited = [
        listener.admitted if listener.plays_until is None else listener.plays_until
        for listener in idle
        if listener.ready_since > now
    ]
    return ready, now, workers - len(running), awaited


def poisson(count: int, mean_gap: float, seed: int) -> list[float]:
    generator, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at += generator.expovariate(1 / mean_gap)
        arrivals.append(at)
    return arrivals


def arriving(times: list[float]) -> list[Listener]:
    return [Listener(at) for at in times]


# seconds per token at which 32 streams are all that can be served
FULL_LOAD = 1 / (32 * TOKENS_PER_SECOND)


@pytest.mark.parametrize("seed", range(4))
def test_playback_and_first_audio_at_70_percent_load(seed: int) -> None:
    listeners = replay(
        arriving(poisson(32, 0.1, seed)), 60.0, most=8, fixed=0.004, per_token=0.7 * FULL_LOAD
    )
    assert max(gap for listener in listeners for gap in listener.gaps) == 0
    assert max(listener.first for listener in listeners) < 0.5


def test_overload_starves_nobody() -> None:
    listeners = replay(
        arriving(poisson(32, 0.5, 0)), 60.0, most=8, fixed=0.004, per_token=2 * FULL_LOAD
    )
    progress = [listener.tokens / (60.0 - listener.admitted) for listener in listeners]
    assert max(listener.first for listener in listeners) < 8
    assert min(progress) > 0.6 * max(progress)


def test_a_flood_of_new_streams_does_not_starve_open_streams() -> None:
    listeners = arriving([0.0] + [5 + 0.001 * i for i in range(60)])
    replay(listeners, 9.0, most=8, fixed=0.01, per_token=0.0005)
    assert max(listeners[0].gaps) == 0
    assert all(listener.plays_until is not None for listener in listeners)


# Number of workers, seconds for a batch, and seconds for each token in the batch. The first two
# hosts run the `small` model on 2 cores (docs/tuning.md): one worker on both cores, or two workers
# on one core each. The third host is ten times as fast.
ONE_WORKER, TWO_WORKERS, FAST = (1, 0.065, 0.0033), (2, 0.082, 0.0042), (1, 0.0065, 0.00033)


@pytest.mark.parametrize(
    ("host", "paced", "longest_gap", "bulk_seconds"),
    [
        (ONE_WORKER, 1, 0.6, 480),
        (TWO_WORKERS, 1, 0.3, 600),
        (TWO_WORKERS, 4, 0.6, 450),
        (FAST, 4, 0.0, 3000),
    ],
)
def test_long_utterances_do_not_starve_paced_streams(
    host: tuple[int, float, float], paced: int, longest_gap: float, bulk_seconds: float
) -> None:
    """Eight long utterances arrive after 10 s and run for 50 s beside paced listeners."""
    listeners = [Listener(0.37 * number) for number in range(paced)]
    bulk = [Listener(10.0, longest=100, at_once=True) for _ in range(8)]
    workers, fixed, per_token = host
    replay(listeners + bulk, 60.0, 8, fixed, per_token, workers)
    assert max(gap for listener in listeners for gap in listener.gaps) <= longest_gap
    # the long utterances get the rest of the capacity
    tokens = [listener.tokens for listener in bulk]
    assert sum(tokens) / TOKENS_PER_SECOND >= bulk_seconds
    assert min(tokens) > 0.8 * max(tokens)


@pytest.mark.parametrize(
    ("host", "first", "end"), [(ONE_WORKER, 7, 15), (TWO_WORKERS, 5, 12), (FAST, 0.5, 1)]
)
def test_newcomers_pass_a_crowd_of_long_utterances(
    host: tuple[int, float, float], first: float, end: float
) -> None:
    """60 texts of minutes take all capacity, and every 5 s somebody says 3 s."""
    crowd = [Listener(0.0, longest=100, at_once=True) for _ in range(60)]
    newcomers = [
        Listener(10.0 + 5 * number, longest=100, at_once=True, total=75) for number in range(28)
    ]
    workers, fixed, per_token = host
    replay(crowd + newcomers, 180.0, 8, fixed, per_token, workers)
    assert max(listener.first for listener in newcomers) <= first
    assert max(listener.taken - listener.admitted for listener in newcomers) <= end
    assert min(listener.tokens for listener in newcomers) == 75
    tokens = [listener.tokens for listener in crowd]
    assert min(tokens) > 0.8 * max(tokens)


def test_newcomers_do_not_wait_for_long_utterances() -> None:
    bulk = [Listener(0.0, longest=100, at_once=True) for _ in range(8)]
    newcomers = arriving([20.0 + 2.3 * number for number in range(8)])
    replay(bulk + newcomers, 60.0, 8, *TWO_WORKERS[1:], workers=2)
    assert max(listener.first for listener in newcomers) < 0.5
