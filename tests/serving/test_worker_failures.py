"""Failures of one utterance do not harm other utterances."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from testkit.models.tiny_model import WAIT_SECONDS, FaultyVocoder, demo_tokens
from testkit.patience import until
from testkit.replies import (
    FIRST,
    SECOND,
    BrokenReply,
    Counter,
    Expected,
    FakeClock,
    Make,
    RecordingReply,
    assert_serves,
    joined,
    send,
    speak,
)
from token2wav import BackendError, StreamClosedError, Token2Wav, Voice
from token2wav.errors import DeviceLostError
from token2wav.serving import pipeline
from token2wav.serving.observer import Observer
from token2wav.serving.turn import Answer, Turn
from token2wav.serving.worker import WorkerPool


def test_a_lost_device_is_reported_after_failed_utterances(
    make: Make,
    faulty: tuple[Token2Wav, FaultyVocoder],
    voice: Voice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(device: torch.device, cause: BaseException) -> None:
        raise DeviceLostError("backend: this process can no longer use the GPU")

    monkeypatch.setattr(pipeline, "check_device", lost)
    model, vocoder = faulty
    report, reply = threading.Event(), RecordingReply()

    def tell() -> None:
        assert reply.outcomes == ["failed"]
        report.set()

    workers = make(model, on_device_lost=tell)
    vocoder.fault = RuntimeError("CUDA error: device-side assert triggered")
    send(workers, workers.utterances.open(voice), demo_tokens(FIRST), reply)
    assert isinstance(reply.failed(), DeviceLostError)
    assert report.wait(WAIT_SECONDS)


def test_an_engine_that_cannot_open_fails_the_request(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, expected: Expected
) -> None:
    model, vocoder = faulty
    workers = make(model)
    vocoder.open_fault = RuntimeError("no room")
    assert isinstance(speak(workers, voice, 4).failed(), BackendError)
    vocoder.open_fault = None
    assert_serves(workers, voice, expected)


def test_a_reply_that_raises_harms_nobody(
    workers: WorkerPool, model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    closed, reply = Counter(), BrokenReply()
    send(workers, workers.utterances.open(voice, closed), demo_tokens(FIRST), reply, end=True)
    reply.failed()
    assert closed.count == 1
    assert model.pipeline.open_streams == 0
    assert_serves(workers, voice, expected)


def test_a_reply_that_cannot_even_be_asked_harms_nobody(
    workers: WorkerPool, voice: Voice, expected: Expected
) -> None:
    class Unaskable(RecordingReply):
        def is_cancelled(self) -> bool:
            raise ConnectionError("gone")

    send(workers, workers.utterances.open(voice), [1], Unaskable(), keep_open=True).failed()
    assert_serves(workers, voice, expected)


def test_an_internal_error_frees_cancelled_streams(
    make: Make,
    faulty: tuple[Token2Wav, FaultyVocoder],
    voice: Voice,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cancelled stream has left the scheduler, but its worker still has to free its state."""
    model, vocoder = faulty
    workers = make(model)
    utterance, settle, faults = (
        workers.utterances.open(voice),
        workers.utterances.scheduler.settle,
        [ValueError("a bug")],
    )

    def failing(turn: Turn, *arguments: Any) -> list[Answer]:
        if utterance.over and faults:
            raise faults.pop()
        return settle(turn, *arguments)

    def cancel() -> None:  # not by the worker itself, which would free it at once
        elsewhere = threading.Thread(target=workers.utterances.cancel, args=(utterance,))
        elsewhere.start()
        elsewhere.join()

    monkeypatch.setattr(workers.utterances.scheduler, "settle", failing)
    vocoder.meanwhile["advance"] = cancel
    reply = send(workers, utterance, demo_tokens(FIRST), end=True)
    assert isinstance(reply.failed(), StreamClosedError)
    until(lambda: not faults)
    assert_serves(workers, voice, expected)
    assert model.pipeline.open_streams == 0


@pytest.mark.parametrize("decides", [True, False])
def test_a_defect_in_an_interruption_does_not_end_the_interrupted_batch(
    make: Make, voice: Voice, expected: Expected, decides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision fails, or both the turn and its end."""
    workers, faults = make(), list[str]()

    def next_interruption(turn: Turn, spent: float) -> str:
        faults.append("a bug")
        if not decides:
            raise ValueError("a bug")
        return "no turn"

    monkeypatch.setattr(workers.utterances.scheduler._policy, "is_long", lambda tokens: True)
    monkeypatch.setattr(workers.utterances, "next_interruption", next_interruption)
    assert_serves(workers, voice, expected)
    assert faults


def test_an_interruption_has_the_time_of_its_own_work_on_the_device(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of the batch that the device computes meanwhile is no part of it."""
    clock = FakeClock()
    workers = make(clock=clock)
    waits = [1.0, 0.25]  # for the step, and for the last kernels of the interruption

    def take(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(workers._pipeline, "wait", lambda: take(waits.pop(0)))
    monkeypatch.setattr(workers, "_take", lambda turn: take(0.125))
    monkeypatch.setattr(workers.utterances, "next_interruption", lambda turn, spent: turn)
    turn: Any = "a turn"
    assert workers._interrupt(turn, 0.0) == 0.375


def broken(*_: object) -> None:
    raise OSError("a metric is gone")


def test_an_observer_that_raises_at_every_call_harms_nobody(
    make: Make, model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    class Broken(Observer):
        changed = computed = sent = ended = broken  # type: ignore[assignment]

    workers = make(observer=Broken())
    workers.utterances.cancel(workers.utterances.open(voice))
    for count in (4, FIRST, SECOND + 1):
        utterance = workers.utterances.open(voice, broken)
        reply = send(workers, utterance, demo_tokens(count), end=True)
        assert np.array_equal(joined(reply), expected(count))
    assert model.pipeline.open_streams == 0


@pytest.mark.parametrize("call", ["next_turn", "finish_turn", "settle", "overdue"])
def test_a_worker_survives_an_internal_error(
    make: Make, voice: Voice, expected: Expected, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The affected request receives an error, or its audio all the same."""
    workers = make()
    real, faults = getattr(workers.utterances.scheduler, call), [ValueError("a bug")]

    def once(*arguments: object) -> object:
        if threading.current_thread().name.startswith("token2wav") and faults:
            raise faults.pop()
        return real(*arguments)

    monkeypatch.setattr(workers.utterances.scheduler, call, once)
    utterance = workers.utterances.open(voice)
    send(workers, utterance, demo_tokens(FIRST), end=True, keep_open=True).wait()
    until(lambda: not faults)
    assert_serves(workers, voice, expected)
    until(
        lambda: workers.utterances.scheduler.idle_workers == 1
    )  # the client hears before the worker's turn ends
    assert all(thread.is_alive() for thread in workers._threads)
