"""However an utterance ends, it ends once and frees all it held."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.unit.material import WAIT_SECONDS, FaultyVocoder, demo_tokens
from tests.unit.scheduling import (
    FIRST,
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
    until,
)
from token2wav import StreamClosedError, Token2Wav, Voice
from token2wav.errors import ExpiredError, IdleError
from token2wav.scheduler import Scheduler
from token2wav.utterance import Observer


def test_an_idle_utterance_is_dropped(make: Make, model: Token2Wav, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    scheduler = make(clock=clock, idle_seconds=30.0)
    utterance = scheduler.open(voice, closed)
    kept, reply = RecordingReply(), RecordingReply()
    scheduler.push(utterance, [1], kept, end=False, keep_open=True)
    scheduler.push(utterance, [1], reply, end=False)
    reply.succeeded()
    clock.now += 29.0
    scheduler.push(utterance, [1], again := RecordingReply(), end=False)  # counts from here
    again.succeeded()
    clock.now += 29.0
    time.sleep(0.2)  # several polls
    assert not utterance.closed
    assert model.pipeline.open_streams == 1
    clock.now += 2.0
    error = kept.failed()
    assert isinstance(error, IdleError)
    assert str(error) == "stream: no tokens for 30 s; it was dropped"
    assert str(refused(scheduler, utterance, [1])) == str(error)
    until(lambda: closed.count == 1)
    assert model.pipeline.open_streams == 0


def test_an_utterance_without_any_request_is_dropped_too(make: Make, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    scheduler = make(clock=clock, idle_seconds=30.0)
    time.sleep(0.1)  # the scheduler's thread sleeps
    scheduler.open(voice, closed)
    clock.now += 31.0
    until(lambda: closed.count == 1)
    assert scheduler.open_utterances == 0


def test_requests_without_tokens_are_no_sign_of_life(make: Make, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    scheduler = make(clock=clock, idle_seconds=30.0)
    utterance = scheduler.open(voice, closed)
    for _ in range(3):
        clock.now += 10.0
        scheduler.push(utterance, [], reply := RecordingReply(), end=False)
        reply.succeeded()
    clock.now += 1.0
    until(lambda: closed.count == 1)
    assert isinstance(refused(scheduler, utterance, []), StreamClosedError)


def test_a_stream_has_a_longest_life(make: Make, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    scheduler = make(clock=clock, idle_seconds=30.0, stream_tokens=850)
    utterance, kept = scheduler.open(voice, closed), RecordingReply()
    scheduler.push(utterance, [1], kept, end=False, keep_open=True)
    for _ in range(5):
        clock.now += 20.0
        scheduler.push(utterance, [1], reply := RecordingReply(), end=False)
        reply.succeeded()
    assert not utterance.closed
    clock.now += 3.0
    error = kept.failed()
    assert isinstance(error, ExpiredError)
    assert str(error) == "stream: open for 102 s, which is the limit of one stream; it was dropped"
    assert closed.count == 1


def test_a_request_that_takes_long_is_not_idleness(make: Make, voice: Voice, expected: Expected) -> None:
    clock = FakeClock()
    scheduler = make(clock=clock, idle_seconds=30.0)
    utterance, slow, rest = scheduler.open(voice), GatedReply(), RecordingReply()
    scheduler.push(utterance, demo_tokens(30)[:FIRST], slow, end=False)
    assert slow.reached.wait(WAIT_SECONDS)
    clock.now += 100.0
    slow.gate.set()
    slow.succeeded()
    time.sleep(0.2)  # several polls; idle time counts from the end of the work
    scheduler.push(utterance, demo_tokens(30)[FIRST:], rest, end=True)
    assert np.array_equal(joined(slow, rest), expected(30))


def test_cancel_fails_what_waits_and_is_harmless_when_it_is_over(
    scheduler: Scheduler, model: Token2Wav, voice: Voice
) -> None:
    running, waiting, closed = GatedReply(), RecordingReply(), Counter()
    utterance = scheduler.open(voice, closed)
    scheduler.push(utterance, demo_tokens(SECOND), running, end=False)
    scheduler.push(utterance, [1], waiting, end=True)
    assert running.reached.wait(WAIT_SECONDS)
    scheduler.cancel(utterance)
    running.gate.set()
    for reply in (running, waiting):
        assert isinstance(reply.failed(), StreamClosedError)
    scheduler.cancel(utterance)
    assert closed.count == 1
    assert len(running.chunks) == 1
    until(lambda: model.pipeline.open_streams == 0)  # the worker that was sending frees it


def test_a_client_that_vanishes_ends_its_utterance(scheduler: Scheduler, model: Token2Wav, voice: Voice) -> None:
    reply, closed = GatedReply(), Counter()
    scheduler.push(scheduler.open(voice, closed), demo_tokens(SECOND + 100), reply, end=True)
    assert reply.reached.wait(WAIT_SECONDS)
    reply.cancelled = True
    reply.gate.set()
    assert isinstance(reply.failed(), StreamClosedError)
    assert len(reply.chunks) == 1
    assert closed.count == 1
    assert model.pipeline.open_streams == 0


@pytest.mark.parametrize("how", ["ended", "cancelled", "failed"])
def test_on_close_is_called_once_and_before_the_last_word(scheduler: Scheduler, voice: Voice, how: str) -> None:
    journal: list[str] = []
    reply = RecordingReply("reply", journal)
    utterance = scheduler.open(voice, lambda: journal.append("closed"))
    scheduler.push(utterance, [1, 2, 3], reply, end=how == "ended", keep_open=True)
    if how == "cancelled":
        scheduler.cancel(utterance)
    elif how == "failed":
        refused(scheduler, utterance, [-1])
    reply.wait()
    scheduler.cancel(utterance)
    assert [entry for entry in journal if entry != "reply0"] in (
        [["closed", "reply finished"]] if how == "ended" else [["closed", "reply failed"]]
    )


def test_an_observer_sees_utterances_admitted_started_and_ended(make: Make, model: Token2Wav, voice: Voice) -> None:
    seen: list[tuple[int, int]] = []

    class Onlooker(Observer):
        def changed(self, open_utterances: int) -> None:
            seen.append((open_utterances, model.pipeline.open_streams))

    watched = make(observer=Onlooker())
    first = watched.open(voice)
    second = watched.open(voice)
    watched.cancel(first)
    reply = RecordingReply()
    watched.push(second, [1], reply, end=True)
    reply.succeeded()
    watched.close()
    assert seen == [(1, 0), (2, 0), (1, 0), (1, 1), (0, 0)]


@pytest.mark.parametrize("moment", ["open", "advance"])
def test_a_cancellation_while_the_engine_works_frees_all(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, expected: Expected, moment: str
) -> None:
    model, vocoder = faulty
    scheduler, reply, closed = make(model), RecordingReply(), Counter()
    utterance = scheduler.open(voice, closed)
    vocoder.meanwhile[moment] = lambda: scheduler.cancel(utterance)
    scheduler.push(utterance, demo_tokens(SECOND), reply, end=True)
    assert isinstance(reply.failed(), StreamClosedError)
    assert_serves(scheduler, voice, expected)  # after it, the cancelled turn is over
    assert reply.chunks == []
    assert reply.outcomes == ["failed"]
    assert closed.count == 1
    assert model.pipeline.open_streams == 0


@pytest.mark.parametrize("moment", ["open", "advance"])
def test_the_last_thing_told_of_a_cancellation_while_the_engine_works_is_that_nothing_is_open(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, moment: str
) -> None:
    """Else a gauge would show a stream that is gone, until another one comes or ends."""
    model, vocoder = faulty
    told: list[int] = []

    class Onlooker(Observer):
        def changed(self, open_utterances: int) -> None:
            told.append(model.pipeline.open_streams)

    scheduler, reply = make(model, observer=Onlooker()), RecordingReply()
    utterance = scheduler.open(voice)
    vocoder.meanwhile[moment] = lambda: scheduler.cancel(utterance)
    scheduler.push(utterance, demo_tokens(SECOND), reply, end=True)
    assert isinstance(reply.failed(), StreamClosedError)
    until(lambda: told[-1] == 0)
    scheduler.close()
    assert told[-1] == 0
