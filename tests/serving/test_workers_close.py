"""Workers that shut down: what is open, what is refused, how long it waits."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.serving.replies import FIRST, SECOND, Counter, Expected, GatedReply, Make, RecordingReply, joined, until
from tests.unit.material import WAIT_SECONDS, demo_tokens
from token2wav import LimitError, Token2Wav, Voice
from token2wav.serving.worker import WorkerPool


def test_close_ends_what_is_open_and_takes_nothing_new(make: Make, model: Token2Wav, voice: Voice) -> None:
    workers, closed = make(), Counter()
    utterance = workers.open(voice, closed)
    reply, waiting = GatedReply(), RecordingReply()
    workers.push(utterance, demo_tokens(SECOND), reply, end=False)
    workers.push(utterance, [1], waiting, end=True)
    assert reply.reached.wait(WAIT_SECONDS)
    closer = threading.Thread(target=workers.close)
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
        workers.open(voice)


def test_close_waits_for_open_requests_when_asked_to(
    make: Make, model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    workers = make()
    utterance, first, rest = workers.open(voice), GatedReply(), RecordingReply()
    workers.push(utterance, demo_tokens(30)[:FIRST], first, end=False)
    assert first.reached.wait(WAIT_SECONDS)
    closer = threading.Thread(target=workers.close, args=(WAIT_SECONDS,))
    closer.start()
    until(lambda: refuses_new(workers, voice))
    first.gate.set()
    workers.push(utterance, demo_tokens(30)[FIRST:], rest, end=True)  # an open one may go on
    assert np.array_equal(joined(first, rest), expected(30))
    closer.join(WAIT_SECONDS)
    assert not closer.is_alive()
    assert model.pipeline.open_streams == 0


def refuses_new(workers: WorkerPool, voice: Voice) -> bool:
    try:
        workers.cancel(workers.open(voice))
    except LimitError:
        return True
    return False


def test_close_does_not_wait_longer_than_asked(make: Make, voice: Voice) -> None:
    workers, reply = make(), RecordingReply()
    utterance = workers.open(voice)
    workers.push(utterance, [1], reply, end=False, keep_open=True)
    before = time.monotonic()
    workers.close(drain_seconds=0.3)
    assert 0.3 <= time.monotonic() - before < WAIT_SECONDS
    assert isinstance(reply.failed(), LimitError)
    workers.close()


def test_the_thread_of_a_closed_scheduler_is_gone(make: Make) -> None:
    workers = make()
    running = [thread for thread in threading.enumerate() if thread.name.startswith("token2wav-worker-")]
    workers.close()
    assert len(running) == 1
    assert not running[0].is_alive()
