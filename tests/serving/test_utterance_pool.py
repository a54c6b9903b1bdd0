"""Pool of requests: refusals, merged requests, order of replies, and the calls of an observer."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from testkit.models.tiny_model import demo_tokens
from testkit.patience import until
from testkit.replies import (
    FIRST,
    LIMITS,
    Counter,
    Expected,
    FakeClock,
    GatedReply,
    Make,
    RecordingReply,
    assert_serves,
    joined,
    refused,
    send,
    speak,
)
from token2wav import (
    LimitError,
    StreamClosedError,
    Token2Wav,
    Voice,
)
from token2wav.serving.observer import Observer
from token2wav.serving.scheduler import MAX_WAITING_MESSAGES
from token2wav.serving.turn import Computed, Turn
from token2wav.serving.utterance import Utterance
from token2wav.serving.utterance_pool import UtterancePool
from token2wav.serving.worker import WorkerPool

WORKER = 0


@pytest.mark.parametrize("keep_open", [True, False])
@pytest.mark.parametrize("before", [0, FIRST])
def test_audio_of_the_tokens_before_a_refused_one_precedes_the_error(
    workers: WorkerPool, voice: Voice, expected: Expected, before: int, keep_open: bool
) -> None:
    tokens, replies = demo_tokens(before + 20), [RecordingReply() for _ in range(3)]
    utterance = workers.utterances.open(voice, closed := Counter())
    push = workers.utterances.push
    push(utterance, tokens[:before], replies[0], end=False, keep_open=keep_open)
    push(utterance, [*tokens[before:], 6561, 1], replies[1], end=False)
    with contextlib.suppress(StreamClosedError):  # the client does not know of the end yet
        push(utterance, [1], replies[2], end=True)
        assert str(replies[2].failed()) == str(replies[1].failed())
    words = "tokens: 6561 at index 20 is outside the vocabulary 0 to 6560"
    assert str(replies[1].failed()) == words
    chunks = [chunk for reply in replies for chunk in reply.chunks]
    assert np.array_equal(np.concatenate([chunk.audio for chunk in chunks]), expected(len(tokens)))
    assert not any(chunk.final for chunk in chunks)
    assert replies[0].outcomes == ["failed" if keep_open else "finished"]
    assert str(refused(workers, utterance, [1])) == f"stream: it failed: {words}"
    until(lambda: closed.count == 1)


def test_one_limit_of_tokens_for_all_requests_of_an_utterance(make: Make, voice: Voice) -> None:
    workers = make(stream_tokens=30)
    utterance = workers.utterances.open(voice)
    for count in (20, 10):
        send(workers, utterance, demo_tokens(count)).succeeded()
    assert "tokens: the utterance would exceed 30 tokens" in str(refused(workers, utterance, [1]))
    assert utterance.over


def test_requests_above_the_limit_of_waiting_ones_are_merged(
    make: Make, voice: Voice, expected: Expected
) -> None:
    """A client that sends single tokens faster than the server computes them loses nothing."""
    tokens = demo_tokens(FIRST + 400)
    workers, running = make(), GatedReply()
    utterance = workers.utterances.open(voice)
    send(workers, utterance, tokens[:FIRST], running)
    running.sending.wait_until_called()
    replies = [send(workers, utterance, [token]) for token in tokens[FIRST:]]
    # Besides the running request. The memory of all others is free.
    waiting = [reply for reply in replies if not reply.over.is_set()]
    assert len(waiting) == MAX_WAITING_MESSAGES - 1
    assert not any(reply.chunks for reply in replies)
    last = send(workers, utterance, [], end=True)
    running.sending.gate.set()
    last.wait()
    assert np.array_equal(joined(running, *replies, last), expected(len(tokens)))


def test_a_merged_message_that_stays_open_is_not_finished(make: Make, voice: Voice) -> None:
    workers, running = make(), GatedReply()
    utterance = workers.utterances.open(voice)
    send(workers, utterance, demo_tokens(FIRST), running)
    running.sending.wait_until_called()
    for _ in range(MAX_WAITING_MESSAGES - 2):
        send(workers, utterance, [1])
    stays_open = send(workers, utterance, [1], keep_open=True)
    send(workers, utterance, [1])  # takes its place
    assert not stays_open.over.is_set()
    last = send(workers, utterance, [], end=True)
    running.sending.gate.set()
    last.wait()
    assert stays_open.succeeded() == []


@pytest.mark.parametrize("most", [3, 1])  # by default half of 5, rounded up
def test_streams_and_those_of_named_clients_are_limited(
    make: Make, voice: Voice, expected: Expected, most: int
) -> None:
    workers = make(streams=5, streams_per_client=0 if most == 3 else most)
    admit, cancel = partial(workers.utterances.open, voice), workers.utterances.cancel
    opened = [admit(client="alice") for _ in range(most)]
    with pytest.raises(
        LimitError, match=rf"^streams: client 'alice' has {most} open, the most .*try again later$"
    ):
        admit(client="alice")
    opened += [admit(client="bob"), *(admit() for _ in range(4 - most))]
    for client in ("bob", ""):  # without a balancer, clients have no names
        with pytest.raises(LimitError, match=r"^streams: all 5 are in use"):
            admit(client=client)
    cancel(opened.pop(0))
    opened.append(admit(client="alice"))
    cancel(opened.pop())
    assert_serves(workers, voice, expected)
    for utterance in opened:
        cancel(utterance)


@pytest.mark.parametrize("how", ["ended", "cancelled", "failed"])
def test_on_close_is_called_once_and_before_the_last_word(
    workers: WorkerPool, voice: Voice, how: str
) -> None:
    journal: list[str] = []
    reply = RecordingReply("reply", journal)
    utterance = workers.utterances.open(voice, lambda _: journal.append("closed"))
    send(workers, utterance, [1, 2, 3], reply, end=how == "ended", keep_open=True)
    if how == "cancelled":
        workers.utterances.cancel(utterance)
    elif how == "failed":
        refused(workers, utterance, [0.5])
    reply.wait()
    workers.utterances.cancel(utterance)
    assert [entry for entry in journal if entry != "reply0"] in (
        [["closed", "reply finished"]] if how == "ended" else [["closed", "reply failed"]]
    )


def test_an_observer_sees_utterances_admitted_started_and_ended(
    make: Make, model: Token2Wav, voice: Voice
) -> None:
    seen: list[tuple[int, int]] = []
    admitted: list[int] = []
    reasons: list[str] = []

    class Onlooker(Observer):
        def admitted(self, open_utterances: int) -> None:
            admitted.append(open_utterances)

        def changed(self, open_utterances: int) -> None:
            seen.append((open_utterances, model.pipeline.open_streams))

        def ended(self, utterance: Utterance, reason: str) -> None:
            reasons.append(reason)

    watched = make(observer=Onlooker())
    first = watched.utterances.open(voice)
    second = watched.utterances.open(voice)
    assert admitted == [1, 2]  # at once, because a server that drains must not seem to be empty
    until(lambda: bool(seen) and seen[-1] == (2, 0))
    watched.utterances.cancel(first)
    until(lambda: seen[-1] == (1, 0))
    send(watched, second, [1])
    until(lambda: seen[-1] == (1, 1))
    send(watched, second, [1], end=True).succeeded()
    send(watched, watched.utterances.open(voice), [1])
    watched.close()
    assert seen[-1] == (0, 0)
    assert reasons == ["cancelled", "finished", "LimitError"]


def test_a_worker_that_hangs_in_an_interruption_is_one_worker(
    model: Token2Wav,
    voice: Voice,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = UtterancePool(model.pipeline, LIMITS, None, clock := FakeClock(), Counter())
    monkeypatch.setattr(pool.scheduler._policy, "may_interrupt", lambda *_: True)
    for _ in range(2):
        pool.push(pool.open(voice), [1], RecordingReply(), end=False)
    turn = pool.next_turn(WORKER)
    assert turn
    interrupting = pool.next_interruption(turn, 0.0)
    assert interrupting
    pool.push(waiting := pool.open(voice), [1], RecordingReply(), end=False)
    clock.now += 181.0
    pool.fail_hung()
    pool.fail_hung()
    assert pool.next_interruption(turn, 0.0) is None
    for ended in (interrupting, turn):
        pool.finish_turn(ended, Computed([None], 0.1, {}))
    assert caplog.messages == [
        f"worker {WORKER} hangs: its batch has run for 181 s, and its 2 streams have failed; 0 of "
        "1 workers still run",
        f"worker {WORKER} has finished its batch after 181 s and accepts requests again",
    ]
    assert pool.scheduler.utterances == [waiting]


def test_a_message_wakes_no_worker_unless_a_chunk_is_ready(
    model: Token2Wav, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = UtterancePool(model.pipeline, LIMITS, None, time.monotonic, Counter())
    monkeypatch.setattr(pool._lock, "notify", woken := Counter())
    utterance = pool.open(voice)
    pool.push(utterance, [], RecordingReply(), end=False)
    assert woken.count == 1
    turn = pool.next_turn(WORKER)
    assert turn is not None
    model.pipeline.open(utterance)
    pool.push(utterance, [1], RecordingReply(), end=False)
    pool.finish_turn(turn, Computed([None], 0.1, {}))
    assert woken.count == 1
    pool.push(utterance, [1], RecordingReply(), end=False)
    assert woken.count == 1
    pool.push(utterance, demo_tokens(FIRST), RecordingReply(), end=False)
    assert woken.count == 2
    pool.cancel(utterance)


def test_requests_are_answered_in_order_with_their_chunks(
    workers: WorkerPool, model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    tokens, journal = demo_tokens(80), list[str]()
    a, b, c, d = (RecordingReply(name, journal) for name in "abcd")
    utterance = workers.utterances.open(voice)
    for part, reply in zip(np.split(tokens, [10, FIRST]), (a, b, c), strict=True):
        send(workers, utterance, part, reply)
    c.wait()
    assert model.pipeline.open_streams == 1
    send(workers, utterance, [], d, end=True)
    assert np.array_equal(joined(a, b, c, d), expected(80))
    assert journal == ["a finished", "b0", "b finished", "c1", "c finished", "d2", "d finished"]
    assert utterance.over


def test_a_reply_that_is_kept_open_finishes_last(workers: WorkerPool, voice: Voice) -> None:
    tokens, journal = demo_tokens(30), list[str]()
    kept, middle, end = (RecordingReply(name, journal) for name in ("kept", "middle", "end"))
    utterance = workers.utterances.open(voice)
    send(workers, utterance, tokens[:FIRST], kept, keep_open=True)
    send(workers, utterance, tokens[FIRST:], middle).succeeded()
    send(workers, utterance, [], end, end=True)
    kept.succeeded()
    assert journal == ["kept0", "middle finished", "end1", "end finished", "kept finished"]


def test_the_scheduler_gets_the_time_of_each_opening(
    make: Make, model: Token2Wav, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_open(utterance: Utterance) -> None:
        clock.now += 2.0
        open_utterance(utterance)

    def noted(turn: Turn, results: Any, seconds: float, now: float) -> Any:
        if turn.opens:
            opened.append(seconds)
        return finish_turn(turn, results, seconds, now)

    clock, opened = FakeClock(), list[float]()
    workers, open_utterance = make(clock=clock), model.pipeline.open
    finish_turn = workers.utterances.scheduler.finish_turn
    monkeypatch.setattr(model.pipeline, "open", slow_open)
    monkeypatch.setattr(workers.utterances.scheduler, "finish_turn", noted)
    speak(workers, voice, 3).succeeded()
    speak(workers, voice, 3).succeeded()
    assert opened == [2.0, 2.0]
