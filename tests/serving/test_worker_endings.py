"""Every utterance ends exactly once and frees its state, in every way in which it can end."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from testkit.models.tiny_model import WAIT_SECONDS, FaultyVocoder, demo_tokens
from testkit.patience import until
from testkit.replies import (
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
    send,
    speak,
)
from token2wav import (
    AudioChunk,
    BackendError,
    LimitError,
    StreamClosedError,
    Token2Wav,
    Voice,
)
from token2wav.errors import ExpiredError, IdleError
from token2wav.serving.observer import Observer
from token2wav.serving.utterance import Utterance


def test_an_idle_utterance_is_dropped(make: Make, model: Token2Wav, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    workers = make(clock=clock, idle_seconds=30.0)
    utterance = workers.utterances.open(voice, closed)
    open_reply = send(workers, utterance, [1], keep_open=True)
    send(workers, utterance, [1]).succeeded()
    clock.now += 29.0
    send(workers, utterance, [1]).succeeded()  # counts from here
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


def test_a_stream_has_a_longest_life(make: Make, voice: Voice) -> None:
    clock, closed = FakeClock(), Counter()
    workers = make(clock=clock, idle_seconds=30.0, stream_tokens=850)
    utterance = workers.utterances.open(voice, closed)
    open_reply = send(workers, utterance, [1], keep_open=True)
    for _ in range(5):
        clock.now += 20.0
        send(workers, utterance, [1]).succeeded()
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
    utterance, slow = workers.utterances.open(voice), GatedReply()
    send(workers, utterance, demo_tokens(30)[:FIRST], slow)
    slow.sending.wait_until_called()
    clock.now += 100.0
    slow.sending.gate.set()
    slow.succeeded()
    time.sleep(0.2)  # several polls; idle time counts from the end of the work
    rest = send(workers, utterance, demo_tokens(30)[FIRST:], end=True)
    assert np.array_equal(joined(slow, rest), expected(30))


def test_idle_streams_are_freed_while_the_worker_hangs(
    make: Make, faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, expected: Expected
) -> None:
    model, vocoder = faulty
    clock, hanging = FakeClock(), Hanging()
    workers = make(model, clock=clock, idle_seconds=30.0)
    idle, vanishing = (
        send(workers, workers.utterances.open(voice), [1], keep_open=True) for _ in range(2)
    )
    until(lambda: model.pipeline.open_streams == 2)
    vocoder.meanwhile["advance"] = hanging
    running = speak(workers, voice, FIRST)
    hanging.wait_until_called()
    vanishing.cancelled = True
    assert isinstance(vanishing.failed(), StreamClosedError)
    clock.now += 31.0
    assert isinstance(idle.failed(), IdleError)
    assert (workers.utterances.open_utterances, model.pipeline.open_streams) == (1, 1)
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
    hanging.wait_until_called()
    clock.now += 179.0
    with pytest.raises(LimitError, match=r"try again later$"):
        workers.utterances.open(voice)
    clock.now += 2.0
    with pytest.raises(
        BackendError, match=r"^backend: no batch has finished for 181 s; the server hangs$"
    ):
        workers.utterances.open(voice)
    assert (
        str(running.failed())
        == "backend: the worker of this stream hangs; its batch has run for 181 s"
    )
    hanging.gate.set()
    until(lambda: workers.utterances.scheduler.idle_workers == 1)
    assert model.pipeline.open_streams == 0
    assert_serves(workers, voice, expected)


@pytest.mark.parametrize("moment", ["open", "advance"])
def test_a_cancellation_while_the_engine_works_frees_all(
    make: Make,
    faulty: tuple[Token2Wav, FaultyVocoder],
    voice: Voice,
    expected: Expected,
    moment: str,
) -> None:
    """The observer is called again. Else a gauge would show a stream that is gone, until another
    one comes or ends.
    """
    model, vocoder = faulty
    seen: list[int] = []

    class Onlooker(Observer):
        def changed(self, open_utterances: int) -> None:
            seen.append(model.pipeline.open_streams)

    workers, closed = make(model, observer=Onlooker()), Counter()
    utterance = workers.utterances.open(voice, closed)
    held: list[int] = []

    def cancel() -> None:
        workers.utterances.cancel(utterance)
        held.append(model.pipeline.open_streams)

    vocoder.meanwhile[moment] = cancel
    reply = send(workers, utterance, demo_tokens(SECOND), end=True)
    assert isinstance(reply.failed(), StreamClosedError)
    until(lambda: seen[-1:] == [0])
    assert_serves(workers, voice, expected)  # after it, the cancelled turn is over
    assert held == [1], "the engine may still write to its memory"
    assert reply.chunks == []
    assert reply.outcomes == ["failed"]
    assert closed.count == 1
    assert model.pipeline.open_streams == 0


def test_the_place_of_an_utterance_is_free_before_its_final_chunk_is_sent(
    make: Make, model: Token2Wav, voice: Voice
) -> None:
    """A client opens its next utterance as soon as it has the final chunk."""
    held: list[int] = []

    class Hasty(RecordingReply):
        def send(self, chunk: AudioChunk) -> None:
            super().send(chunk)
            if chunk.final:
                held.append(model.pipeline.open_streams)
                workers.utterances.cancel(workers.utterances.open(voice))

    workers = make(streams=1)
    speak(workers, voice, SECOND, Hasty()).succeeded()
    assert held == [0], "the cache may have no room for the next utterance"


def test_a_client_that_leaves_at_its_final_chunk_has_not_cancelled(
    make: Make, voice: Voice
) -> None:
    reasons: list[str] = []

    class Onlooker(Observer):
        def ended(self, utterance: Utterance, reason: str) -> None:
            reasons.append(reason)

    class Hasty(RecordingReply):
        def send(self, chunk: AudioChunk) -> None:
            super().send(chunk)
            self.cancelled = chunk.final
            workers.utterances.drop_abandoned()

    workers = make(observer=Onlooker())
    speak(workers, voice, SECOND, Hasty()).succeeded()
    assert reasons == ["finished"]


def test_close_ends_open_streams_and_refuses_new_ones(
    make: Make, model: Token2Wav, voice: Voice
) -> None:
    workers, closed = make(), Counter()
    utterance = workers.utterances.open(voice, closed)
    send(workers, utterance, demo_tokens(SECOND), reply := GatedReply())
    waiting = send(workers, utterance, [1], end=True)
    reply.sending.wait_until_called()
    closer = threading.Thread(target=workers.close)
    closer.start()
    for open_reply in (reply, waiting):
        error = open_reply.failed()
        assert isinstance(error, LimitError)
        assert "shutting down" in str(error)
    reply.sending.gate.set()
    closer.join(WAIT_SECONDS)
    assert not closer.is_alive()
    assert closed.count == 1
    assert model.pipeline.open_streams == 0
    with pytest.raises(LimitError, match="shutting down"):
        workers.utterances.open(voice)
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("token2wav-worker-")]
