"""What goes wrong with one utterance harms no other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.material import FaultyVocoder, demo_tokens
from tests.unit.scheduling import (
    FIRST,
    BrokenReply,
    Counter,
    Expected,
    Make,
    RecordingReply,
    assert_serves,
    joined,
    speak,
)
from token2wav import EngineError, Token2Wav, Voice
from token2wav.scheduler import Scheduler


@pytest.mark.parametrize(
    "fault",
    [RuntimeError("out of memory\non two lines"), ValueError("a bug"), float("nan")],
    ids=["engine", "bug", "NaN"],
)
def test_an_engine_failure_ends_one_utterance_and_no_other(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, expected: Expected, fault: BaseException | float
) -> None:
    model, vocoder = faulty
    scheduler = make(model)
    other, started = scheduler.open(voice), RecordingReply()
    scheduler.push(other, demo_tokens(FIRST), started, end=False)
    started.succeeded()

    vocoder.fault = fault
    closed, reply, kept = Counter(), RecordingReply(), RecordingReply()
    utterance = scheduler.open(voice, closed)
    scheduler.push(utterance, [1], kept, end=False, keep_open=True)
    scheduler.push(utterance, demo_tokens(FIRST), reply, end=False)
    error = reply.failed()
    assert isinstance(error, EngineError)
    assert str(error).startswith("engine: ")
    assert kept.failed() is error
    assert closed.count == 1

    rest = RecordingReply()
    scheduler.push(other, demo_tokens(40)[FIRST:], rest, end=True)
    assert np.array_equal(joined(started, rest), expected(40))
    assert model.pipeline.open_streams == 0


def test_an_engine_that_cannot_open_fails_the_request(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, expected: Expected
) -> None:
    model, vocoder = faulty
    scheduler = make(model)
    vocoder.open_fault = RuntimeError("no room")
    assert isinstance(speak(scheduler, voice, 4).failed(), EngineError)
    vocoder.open_fault = None
    assert_serves(scheduler, voice, expected)


def test_a_reply_that_raises_harms_nobody(
    scheduler: Scheduler, model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    closed, reply = Counter(), BrokenReply()
    scheduler.push(scheduler.open(voice, closed), demo_tokens(FIRST), reply, end=True)
    reply.failed()
    assert closed.count == 1
    assert model.pipeline.open_streams == 0
    assert_serves(scheduler, voice, expected)


def test_a_reply_that_cannot_even_be_asked_harms_nobody(scheduler: Scheduler, voice: Voice, expected: Expected) -> None:
    class Unaskable(RecordingReply):
        def is_cancelled(self) -> bool:
            raise ConnectionError("gone")

    reply = Unaskable()
    utterance = scheduler.open(voice)
    scheduler.push(utterance, [1], reply, end=False, keep_open=True)
    reply.failed()
    assert_serves(scheduler, voice, expected)
