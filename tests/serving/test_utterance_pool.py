"""Pool of requests: refusals before any work starts, cancellation, and the calls at the end."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import numpy as np
import pytest

from testkit.models.tiny_model import WAIT_SECONDS, FaultyVocoder, demo_tokens
from testkit.patience import until
from testkit.replies import (
    FIRST,
    LIMITS,
    SECOND,
    Counter,
    Expected,
    FakeClock,
    GatedReply,
    Make,
    RecordingReply,
    assert_serves,
    joined,
    refused,
)
from token2wav import (
    InputError,
    LimitError,
    StreamClosedError,
    Token2Wav,
    Voice,
)
from token2wav.serving.observer import Observer
from token2wav.serving.scheduler import MAX_WAITING_MESSAGES
from token2wav.serving.turn import Computed
from token2wav.serving.utterance import Utterance
from token2wav.serving.utterance_pool import UtterancePool
from token2wav.serving.worker import WorkerPool

WORKER = 0


@pytest.mark.parametrize(
    ("tokens", "end", "words"),
    [
        (
            np.zeros(901, np.int32),
            False,
            "tokens: the utterance would exceed 900 tokens, the limit of one stream",
        ),
        ([6561, 0], False, "tokens: 6561 at index 0 is outside the vocabulary 0 to 6560"),
        ([-1], True, "tokens: -1 at index 0 is outside the vocabulary 0 to 6560"),
        ([], True, "tokens: 0 sent; an utterance needs at least 1"),
    ],
)
def test_a_bad_request_ends_its_utterance_alone(
    workers: WorkerPool, voice: Voice, expected: Expected, tokens: object, end: bool, words: str
) -> None:
    closed, other = Counter(), workers.utterances.open(voice)
    utterance, kept = workers.utterances.open(voice, closed), RecordingReply()
    workers.utterances.push(utterance, [], kept, end=False, keep_open=True)
    error = refused(workers, utterance, tokens, end=end)
    assert isinstance(error, InputError)
    assert kept.failed() is error
    assert words in str(error)
    assert utterance.over
    assert closed.count == 1
    assert isinstance(refused(workers, utterance, [1]), StreamClosedError)
    assert closed.count == 1
    reply = RecordingReply()
    workers.utterances.push(other, demo_tokens(4), reply, end=True)
    assert np.array_equal(joined(reply), expected(4))


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
        workers.utterances.push(utterance, demo_tokens(count), reply := RecordingReply(), end=False)
        reply.succeeded()
    assert "tokens: the utterance would exceed 30 tokens" in str(refused(workers, utterance, [1]))
    assert utterance.over


def test_requests_above_the_limit_of_waiting_ones_are_merged(
    make: Make, voice: Voice, expected: Expected
) -> None:
    """A client that sends single tokens faster than the server computes them loses nothing."""
    tokens = demo_tokens(FIRST + 400)
    workers, running = make(), GatedReply()
    utterance = workers.utterances.open(voice)
    workers.utterances.push(utterance, tokens[:FIRST], running, end=False)
    assert running.reached.wait(WAIT_SECONDS)
    replies = [RecordingReply() for _ in tokens[FIRST:]]
    for token, reply in zip(tokens[FIRST:], replies, strict=True):
        workers.utterances.push(utterance, [token], reply, end=False)
    # Besides the running request. The memory of all others is free.
    waiting = [reply for reply in replies if not reply.over.is_set()]
    assert len(waiting) == MAX_WAITING_MESSAGES - 1
    assert not any(reply.chunks for reply in replies)
    workers.utterances.push(utterance, [], last := RecordingReply(), end=True)
    running.gate.set()
    last.wait()
    assert np.array_equal(joined(running, *replies, last), expected(len(tokens)))


def test_a_merged_message_that_stays_open_is_not_finished(make: Make, voice: Voice) -> None:
    workers, running = make(), GatedReply()
    utterance = workers.utterances.open(voice)
    workers.utterances.push(utterance, demo_tokens(FIRST), running, end=False)
    assert running.reached.wait(WAIT_SECONDS)
    stays_open = RecordingReply()
    for count in range(1, MAX_WAITING_MESSAGES):
        reply = RecordingReply() if count < MAX_WAITING_MESSAGES - 1 else stays_open
        workers.utterances.push(utterance, [1], reply, end=False, keep_open=reply is stays_open)
    workers.utterances.push(utterance, [1], RecordingReply(), end=False)  # takes its place
    assert not stays_open.over.is_set()
    workers.utterances.push(utterance, [], last := RecordingReply(), end=True)
    running.gate.set()
    last.wait()
    assert stays_open.succeeded() == []


def test_a_stream_keeps_its_worker_until_its_replies_are_finished(make: Make, voice: Voice) -> None:
    """Else another worker could compute the stream at the same time."""
    workers, owners = make(), list[int | None]()
    utterance = workers.utterances.open(voice)

    class Finished(RecordingReply):
        def finish(self) -> None:
            owners.append(utterance.owner)
            super().finish()

    workers.utterances.push(utterance, demo_tokens(FIRST), reply := Finished(), end=False)
    reply.wait()
    workers.utterances.push(utterance, [], last := RecordingReply(), end=True)
    last.wait()
    assert None not in owners
    assert len(owners) == 1


@pytest.mark.parametrize("late", [[1], [], [-1], [0.5]])
def test_tokens_after_the_end_are_refused_and_cost_nothing(
    workers: WorkerPool, voice: Voice, expected: Expected, late: object
) -> None:
    running = GatedReply()
    utterance = workers.utterances.open(voice)
    workers.utterances.push(utterance, demo_tokens(SECOND), running, end=True)
    assert running.reached.wait(WAIT_SECONDS)
    for end in (False, True):
        error = refused(workers, utterance, late, end=end)
        assert isinstance(error, StreamClosedError)
        assert str(error) == "stream: it has ended, so it accepts no more tokens"
    running.gate.set()
    assert np.array_equal(joined(running), expected(SECOND))


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


def test_cancel_of_waiting_and_of_ended_requests(
    workers: WorkerPool, model: Token2Wav, voice: Voice
) -> None:
    running, waiting, closed = GatedReply(), RecordingReply(), Counter()
    utterance = workers.utterances.open(voice, closed)
    workers.utterances.push(utterance, demo_tokens(SECOND), running, end=False)
    workers.utterances.push(utterance, [1], waiting, end=True)
    assert running.reached.wait(WAIT_SECONDS)
    workers.utterances.cancel(utterance)
    running.gate.set()
    for reply in (running, waiting):
        assert isinstance(reply.failed(), StreamClosedError)
    workers.utterances.cancel(utterance)
    assert closed.count == 1
    assert len(running.chunks) == 1
    until(lambda: model.pipeline.open_streams == 0)  # the worker that was sending frees it


@pytest.mark.parametrize("how", ["ended", "cancelled", "failed"])
def test_on_close_is_called_once_and_before_the_last_word(
    workers: WorkerPool, voice: Voice, how: str
) -> None:
    journal: list[str] = []
    reply = RecordingReply("reply", journal)
    utterance = workers.utterances.open(voice, lambda _: journal.append("closed"))
    workers.utterances.push(utterance, [1, 2, 3], reply, end=how == "ended", keep_open=True)
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
    watched.utterances.push(second, [1], RecordingReply(), end=False)
    until(lambda: seen[-1] == (1, 1))
    reply = RecordingReply()
    watched.utterances.push(second, [1], reply, end=True)
    reply.succeeded()
    watched.utterances.push(watched.utterances.open(voice), [1], RecordingReply(), end=False)
    watched.close()
    assert seen[-1] == (0, 0)
    assert reasons == ["cancelled", "finished", "LimitError"]


@pytest.mark.parametrize("moment", ["open", "advance"])
def test_observer_sees_no_open_stream_after_a_cancellation(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, moment: str
) -> None:
    """Else a gauge would show a stream that is gone, until another one comes or ends."""
    model, vocoder = faulty
    counts: list[int] = []

    class Onlooker(Observer):
        def changed(self, open_utterances: int) -> None:
            counts.append(model.pipeline.open_streams)

    workers, reply = make(model, observer=Onlooker()), RecordingReply()
    utterance = workers.utterances.open(voice)
    vocoder.meanwhile[moment] = lambda: workers.utterances.cancel(utterance)
    workers.utterances.push(utterance, demo_tokens(SECOND), reply, end=True)
    assert isinstance(reply.failed(), StreamClosedError)
    until(lambda: counts[-1:] == [0])
    workers.close()
    assert counts[-1] == 0


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
