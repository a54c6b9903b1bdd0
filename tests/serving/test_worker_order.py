"""Order of replies, and the time of openings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from testkit.models.tiny_model import demo_tokens
from testkit.replies import (
    FIRST,
    Expected,
    FakeClock,
    Make,
    RecordingReply,
    joined,
    speak,
)
from token2wav import Token2Wav, Voice
from token2wav.serving.turn import Turn
from token2wav.serving.utterance import Utterance
from token2wav.serving.worker import WorkerPool


def test_requests_are_answered_in_order_with_their_chunks(
    workers: WorkerPool, model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    tokens, journal = demo_tokens(80), list[str]()
    a, b, c, d = (RecordingReply(name, journal) for name in "abcd")
    utterance = workers.utterances.open(voice)
    workers.utterances.push(utterance, tokens[:10], a, end=False)
    workers.utterances.push(utterance, tokens[10:FIRST], b, end=False)
    workers.utterances.push(utterance, tokens[FIRST:], c, end=False)
    c.wait()
    assert model.pipeline.open_streams == 1
    workers.utterances.push(utterance, [], d, end=True)
    assert np.array_equal(joined(a, b, c, d), expected(80))
    assert journal == ["a finished", "b0", "b finished", "c1", "c finished", "d2", "d finished"]
    assert utterance.over


def test_a_reply_that_is_kept_open_finishes_last(workers: WorkerPool, voice: Voice) -> None:
    tokens, journal = demo_tokens(30), list[str]()
    kept, middle, end = (RecordingReply(name, journal) for name in ("kept", "middle", "end"))
    utterance = workers.utterances.open(voice)
    workers.utterances.push(utterance, tokens[:FIRST], kept, end=False, keep_open=True)
    workers.utterances.push(utterance, tokens[FIRST:], middle, end=False)
    middle.succeeded()
    workers.utterances.push(utterance, [], end, end=True)
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
