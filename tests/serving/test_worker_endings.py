"""Every utterance ends exactly once and frees its state, in every way in which it can end."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.support.patience import until
from tests.support.replies import (
    FIRST,
    SECOND,
    Counter,
    Expected,
    FakeClock,
    GatedReply,
    Hanging,
    Make,
    RecordingReply,
    assert_serves,
    joined,
    refused,
    speak,
)
from tests.support.tiny_model import WAIT_SECONDS, FaultyVocoder, demo_tokens
from token2wav import BackendError, LimitError, StreamClosedError, Token2Wav, Voice
from token2wav.errors import ExpiredError, IdleError
from token2wav.serving.observer import Observer
from token2wav.serving.worker import WorkerPool


def test_an_idle_utterance_is_dropped(make: Make, model: Token2Wav, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    workers = make(clock=clock, idle_seconds=30.0)
    utterance = workers.requests.open(voice, closed)
    open_reply, reply = RecordingReply(), RecordingReply()
    workers.requests.push(utterance, [1], open_reply, end=False, keep_open=True)
    workers.requests.push(utterance, [1], reply, end=False)
    reply.succeeded()
    clock.now += 29.0
    workers.requests.push(utterance, [1], again := RecordingReply(), end=False)  # counts from here
    again.succeeded()
    clock.now += 29.0
    time.sleep(0.2)  # several polls
    assert not utterance.over
    assert model.pipeline.open_streams == 1
    clock.now += 2.0
    error = open_reply.failed()
    assert isinstance(error, IdleError)
    assert str(error) == "stream: no tokens for 30 s, so it was closed"
    assert str(refused(workers, utterance, [1])) == str(error)
    until(lambda: closed.count == 1)
    assert model.pipeline.open_streams == 0


def test_an_utterance_without_any_request_is_dropped_too(make: Make, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    workers = make(clock=clock, idle_seconds=30.0)
    time.sleep(0.1)  # the scheduler's thread sleeps
    workers.requests.open(voice, closed)
    clock.now += 31.0
    until(lambda: closed.count == 1)
    assert workers.requests.open_requests == 0


def test_requests_without_tokens_are_no_sign_of_life(make: Make, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    workers = make(clock=clock, idle_seconds=30.0)
    utterance = workers.requests.open(voice, closed)
    for _ in range(3):
        clock.now += 10.0
        workers.requests.push(utterance, [], reply := RecordingReply(), end=False)
        reply.succeeded()
    clock.now += 1.0
    until(lambda: closed.count == 1)
    assert isinstance(refused(workers, utterance, []), StreamClosedError)


def test_a_stream_has_a_longest_life(make: Make, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    workers = make(clock=clock, idle_seconds=30.0, stream_tokens=850)
    utterance, open_reply = workers.requests.open(voice, closed), RecordingReply()
    workers.requests.push(utterance, [1], open_reply, end=False, keep_open=True)
    for _ in range(5):
        clock.now += 20.0
        workers.requests.push(utterance, [1], reply := RecordingReply(), end=False)
        reply.succeeded()
    assert not utterance.over
    clock.now += 3.0
    error = open_reply.failed()
    assert isinstance(error, ExpiredError)
    assert str(error) == "stream: open for 102 s, the limit of one stream, so it was closed"
    assert closed.count == 1


def test_a_request_that_takes_long_is_not_idleness(
    make: Make, voice: Voice, expected: Expected
) -> None:
    clock = FakeClock()
    workers = make(clock=clock, idle_seconds=30.0)
    utterance, slow, rest = workers.requests.open(voice), GatedReply(), RecordingReply()
    workers.requests.push(utterance, demo_tokens(30)[:FIRST], slow, end=False)
    assert slow.reached.wait(WAIT_SECONDS)
    clock.now += 100.0
    slow.gate.set()
    slow.succeeded()
    time.sleep(0.2)  # several polls; idle time counts from the end of the work
    workers.requests.push(utterance, demo_tokens(30)[FIRST:], rest, end=True)
    assert np.array_equal(joined(slow, rest), expected(30))


def test_cancel_of_waiting_and_of_ended_requests(
    workers: WorkerPool, model: Token2Wav, voice: Voice
) -> None:
    running, waiting, closed = GatedReply(), RecordingReply(), Counter()
    utterance = workers.requests.open(voice, closed)
    workers.requests.push(utterance, demo_tokens(SECOND), running, end=False)
    workers.requests.push(utterance, [1], waiting, end=True)
    assert running.reached.wait(WAIT_SECONDS)
    workers.requests.cancel(utterance)
    running.gate.set()
    for reply in (running, waiting):
        assert isinstance(reply.failed(), StreamClosedError)
    workers.requests.cancel(utterance)
    assert closed.count == 1
    assert len(running.chunks) == 1
    until(lambda: model.pipeline.open_streams == 0)  # the worker that was sending frees it


def test_a_client_that_vanishes_ends_its_utterance(
    workers: WorkerPool, model: Token2Wav, voice: Voice
) -> None:
    reply, closed = GatedReply(), Counter()
    workers.requests.push(
        workers.requests.open(voice, closed), demo_tokens(SECOND + 100), reply, end=True
    )
    assert reply.reached.wait(WAIT_SECONDS)
    reply.cancelled = True
    assert isinstance(reply.failed(), StreamClosedError)
    reply.gate.set()
    until(lambda: model.pipeline.open_streams == 0)  # the worker that was sending frees it
    assert len(reply.chunks) == 1
    assert closed.count == 1


def test_idle_streams_are_freed_while_the_worker_hangs(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, expected: Expected
) -> None:
    model, vocoder = faulty
    clock, hanging, idle, vanishing = FakeClock(), Hanging(), RecordingReply(), RecordingReply()
    workers = make(model, clock=clock, idle_seconds=30.0)
    for reply in (idle, vanishing):
        workers.requests.push(workers.requests.open(voice), [1], reply, end=False, keep_open=True)
    until(lambda: model.pipeline.open_streams == 2)
    vocoder.meanwhile["advance"] = hanging
    running = speak(workers, voice, FIRST)
    assert hanging.reached.wait(WAIT_SECONDS)
    vanishing.cancelled = True
    assert isinstance(vanishing.failed(), StreamClosedError)
    clock.now += 31.0
    assert isinstance(idle.failed(), IdleError)
    assert (workers.requests.open_requests, model.pipeline.open_streams) == (1, 1)
    hanging.gate.set()
    assert np.array_equal(joined(running), expected(FIRST))


@pytest.mark.parametrize("moment", ["open", "advance"])
def test_a_full_server_reports_its_hung_worker(
    make: Make,
    faulty: tuple[Token2Wav, FaultyVocoder],
    voice: Voice,
    expected: Expected,
    moment: str,
) -> None:
    """Else canary and health check, for which a full server is well, would never restart it."""
    model, vocoder = faulty
    clock, hanging = FakeClock(), Hanging()
    workers = make(model, clock=clock, streams=1, stream_tokens=15000)
    time.sleep(0.1)
    clock.now += 1000.0  # while no stream is open
    vocoder.meanwhile[moment] = hanging
    running = speak(workers, voice, FIRST)
    assert hanging.reached.wait(WAIT_SECONDS)
    clock.now += 179.0
    with pytest.raises(LimitError, match=r"try again later$"):
        workers.requests.open(voice)
    clock.now += 2.0
    with pytest.raises(
        BackendError, match=r"^backend: no batch has finished for 181 s; the server hangs$"
    ):
        workers.requests.open(voice)
    assert (
        str(running.failed())
        == "backend: the worker of this stream hangs; its batch has run for 181 s"
    )
    hanging.gate.set()
    until(lambda: workers._idle_workers == 1)
    assert model.pipeline.open_streams == 0
    assert_serves(workers, voice, expected)


@pytest.mark.parametrize("how", ["ended", "cancelled", "failed"])
def test_on_close_is_called_once_and_before_the_last_word(
    workers: WorkerPool, voice: Voice, how: str
) -> None:
    journal: list[str] = []
    reply = RecordingReply("reply", journal)
    utterance = workers.requests.open(voice, lambda _: journal.append("closed"))
    workers.requests.push(utterance, [1, 2, 3], reply, end=how == "ended", keep_open=True)
    if how == "cancelled":
        workers.requests.cancel(utterance)
    elif how == "failed":
        refused(workers, utterance, [-1])
    reply.wait()
    workers.requests.cancel(utterance)
    assert [entry for entry in journal if entry != "reply0"] in (
        [["closed", "reply finished"]] if how == "ended" else [["closed", "reply failed"]]
    )


def test_an_observer_sees_utterances_admitted_started_and_ended(
    make: Make, model: Token2Wav, voice: Voice
) -> None:
    seen: list[tuple[int, int]] = []

    class Onlooker(Observer):
        def changed(self, open_requests: int) -> None:
            seen.append((open_requests, model.pipeline.open_streams))

    watched = make(observer=Onlooker())
    first = watched.requests.open(voice)
    second = watched.requests.open(voice)
    watched.requests.cancel(first)
    reply = RecordingReply()
    watched.requests.push(second, [1], reply, end=True)
    reply.succeeded()
    watched.close()
    assert seen == [(1, 0), (2, 0), (1, 0), (1, 1), (0, 0)]


@pytest.mark.parametrize("moment", ["open", "advance"])
def test_a_cancellation_while_the_engine_works_frees_all(
    make: Make,
    faulty: tuple[Token2Wav, FaultyVocoder],
    voice: Voice,
    expected: Expected,
    moment: str,
) -> None:
    model, vocoder = faulty
    workers, reply, closed = make(model), RecordingReply(), Counter()
    utterance = workers.requests.open(voice, closed)
    vocoder.meanwhile[moment] = lambda: workers.requests.cancel(utterance)
    workers.requests.push(utterance, demo_tokens(SECOND), reply, end=True)
    assert isinstance(reply.failed(), StreamClosedError)
    assert_serves(workers, voice, expected)  # after it, the cancelled turn is over
    assert reply.chunks == []
    assert reply.outcomes == ["failed"]
    assert closed.count == 1
    assert model.pipeline.open_streams == 0


@pytest.mark.parametrize("moment", ["open", "advance"])
def test_observer_sees_no_open_stream_after_a_cancellation(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, moment: str
) -> None:
    """Else a gauge would show a stream that is gone, until another one comes or ends."""
    model, vocoder = faulty
    counts: list[int] = []

    class Onlooker(Observer):
        def changed(self, open_requests: int) -> None:
            counts.append(model.pipeline.open_streams)

    workers, reply = make(model, observer=Onlooker()), RecordingReply()
    utterance = workers.requests.open(voice)
    vocoder.meanwhile[moment] = lambda: workers.requests.cancel(utterance)
    workers.requests.push(utterance, demo_tokens(SECOND), reply, end=True)
    assert isinstance(reply.failed(), StreamClosedError)
    until(lambda: counts[-1] == 0)
    workers.close()
    assert counts[-1] == 0
