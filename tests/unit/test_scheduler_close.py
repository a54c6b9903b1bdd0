"""A scheduler that shuts down: what is open, what is refused, how long it waits."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.unit.material import WAIT_SECONDS, demo_tokens
from tests.unit.scheduling import FIRST, SECOND, Counter, Expected, GatedReply, Make, RecordingReply, joined, until
from token2wav import LimitError, Token2Wav, Voice
from token2wav.scheduler import Scheduler


def test_close_ends_what_is_open_and_takes_nothing_new(make: Make, model: Token2Wav, voice: Voice) -> None:
    scheduler, closed = make(), Counter()
    utterance = scheduler.open(voice, closed)
    reply, waiting = GatedReply(), RecordingReply()
    scheduler.push(utterance, demo_tokens(SECOND), reply, end=False)
    scheduler.push(utterance, [1], waiting, end=True)
    assert reply.reached.wait(WAIT_SECONDS)
    closer = threading.Thread(target=scheduler.close)
    closer.start()
    for each in (reply, waiting):
        error = each.failed()
        assert isinstance(error, LimitError)
        assert "shutting down" in str(error)
    reply.gate.set()
    closer.join(WAIT_SECONDS)
    assert not closer.is_alive()
    assert closed.count == 1
    assert model.pipeline.open_streams == 0
    with pytest.raises(LimitError, match="shutting down"):
        scheduler.open(voice)


def test_close_waits_for_open_utterances_when_asked_to(
    make: Make, model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    scheduler = make()
    utterance, first, rest = scheduler.open(voice), GatedReply(), RecordingReply()
    scheduler.push(utterance, demo_tokens(30)[:FIRST], first, end=False)
    assert first.reached.wait(WAIT_SECONDS)
    closer = threading.Thread(target=scheduler.close, args=(WAIT_SECONDS,))
    closer.start()
    until(lambda: refuses_new(scheduler, voice))
    first.gate.set()
    scheduler.push(utterance, demo_tokens(30)[FIRST:], rest, end=True)  # an open one may go on
    assert np.array_equal(joined(first, rest), expected(30))
    closer.join(WAIT_SECONDS)
    assert not closer.is_alive()
    assert model.pipeline.open_streams == 0


def refuses_new(scheduler: Scheduler, voice: Voice) -> bool:
    try:
        scheduler.cancel(scheduler.open(voice))
    except LimitError:
        return True
    return False


def test_close_does_not_wait_longer_than_asked(make: Make, voice: Voice) -> None:
    scheduler, reply = make(), RecordingReply()
    utterance = scheduler.open(voice)
    scheduler.push(utterance, [1], reply, end=False, keep_open=True)
    before = time.monotonic()
    scheduler.close(drain_seconds=0.3)
    assert 0.3 <= time.monotonic() - before < WAIT_SECONDS
    assert isinstance(reply.failed(), LimitError)
    scheduler.close()


def test_the_thread_of_a_closed_scheduler_is_gone(make: Make) -> None:
    scheduler = make()
    running = [thread for thread in threading.enumerate() if thread.name.startswith("token2wav-worker-")]
    scheduler.close()
    assert len(running) == 1
    assert not running[0].is_alive()
