"""Shutdown of workers: open streams, rejected requests, and the length of the wait."""

from __future__ import annotations

import threading

import pytest

from testkit.models.tiny_model import WAIT_SECONDS, demo_tokens
from testkit.replies import SECOND, Counter, GatedReply, Make, RecordingReply
from token2wav import LimitError, Token2Wav, Voice


def test_close_ends_open_streams_and_refuses_new_ones(
    make: Make, model: Token2Wav, voice: Voice
) -> None:
    workers, closed = make(), Counter()
    utterance = workers.utterances.open(voice, closed)
    reply, waiting = GatedReply(), RecordingReply()
    workers.utterances.push(utterance, demo_tokens(SECOND), reply, end=False)
    workers.utterances.push(utterance, [1], waiting, end=True)
    assert reply.reached.wait(WAIT_SECONDS)
    closer = threading.Thread(target=workers.close)
    closer.start()
    for open_reply in (reply, waiting):
        error = open_reply.failed()
        assert isinstance(error, LimitError)
        assert "shutting down" in str(error)
    reply.gate.set()
    closer.join(WAIT_SECONDS)
    assert not closer.is_alive()
    assert closed.count == 1
    assert model.pipeline.open_streams == 0
    with pytest.raises(LimitError, match="shutting down"):
        workers.utterances.open(voice)


def test_the_thread_of_a_closed_scheduler_is_gone(make: Make) -> None:
    workers = make()
    running = [
        thread for thread in threading.enumerate() if thread.name.startswith("token2wav-worker-")
    ]
    workers.close()
    assert len(running) == 1
    assert not running[0].is_alive()
