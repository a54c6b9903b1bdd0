"""Rules by which the scheduler selects batches. `test_simulated_load.py` runs them on servers."""

from __future__ import annotations

from typing import Any

import pytest

from token2wav.serving.policy import AHEAD_SECONDS, RESERVE_SECONDS, Policy, ReadyChunk


def ready(
    name: Any,
    since: float,
    plays_until: float | None,
    tokens: int = 25,
    *,
    sent: float = 0.0,
    divisible: bool = True,
) -> ReadyChunk:
    """Returns a chunk of an utterance, in whose place is a name."""
    return ReadyChunk(name, since, plays_until, sent, tokens, 10, False, divisible)


def heard(
    name: str, plays_until: float, tokens: int = 25, since: float = 0.0, sent: float = 1.0
) -> ReadyChunk:
    return ready(name, since, plays_until, tokens, sent=sent)


def fresh(name: str, since: float, tokens: int = 25) -> ReadyChunk:
    return ready(name, since, None, tokens)


def names(batch: list[ReadyChunk]) -> str:
    return "".join(str(chunk.utterance) for chunk in batch)


def first_batch(utterances: list[ReadyChunk], most: int = 8) -> str:
    return names(Policy(most).next_batch(utterances, 0.0))


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
def test_order_of_requests_and_members_of_a_batch(chunks: list[ReadyChunk], batch: str) -> None:
    assert first_batch(chunks) == batch


def test_a_batch_is_bounded() -> None:
    assert first_batch([fresh("a", 3), fresh("b", 1), fresh("c", 2)], most=2) == "bc"


@pytest.mark.parametrize(("workers", "batch"), [(1, "abcde"), (2, "abc"), (4, "ab"), (9, "a")])
def test_idle_workers_share_the_ready_chunks(workers: int, batch: str) -> None:
    utterances = [fresh(name, since) for since, name in enumerate("abcde")]
    assert names(Policy(8).next_batch(utterances, 0.0, workers)) == batch


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
        ready(word[0], 0.0, at / 100, int(word[1]), divisible=not word.endswith("!"))
        for at, word in enumerate(chunks.split())
    ]
    policy = Policy(3 if "h" in chunks else 8, equal_block=1)
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
    others: list[ReadyChunk], fair: str
) -> None:
    policy, utterances = Policy(1), [heard("long", -9.0, since=-50.0, sent=8.0), *others]
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
    policy = Policy(8)
    policy.record_batch(100, 1.0)
    ready = [heard(name, in_hand, tokens) for name in "abcd"]
    assert names(policy.next_batch(ready, 0.0, workers, due)) == batch


def test_the_speed_of_a_worker_is_learned() -> None:
    policy = Policy(8)
    utterances = [heard(name, 4.0, 100) for name in "abcd"]
    # for 100 tokens
    for seconds, most in ((2.0, 2), (1.0, 2), (1.0, 2), (1.0, 2), (1.0, 2), (1.0, 3)):
        policy.record_batch(100, seconds)
        assert len(policy.next_batch(utterances, 0.0)) == most


def test_a_batch_that_only_ends_streams_teaches_nothing() -> None:
    policy = Policy(8)
    policy.record_batch(100, 1.0)
    policy.record_batch(0, 50.0)
    assert len(policy.next_batch([heard(name, 3.5, 100) for name in "abcd"], 0.0)) == 3
