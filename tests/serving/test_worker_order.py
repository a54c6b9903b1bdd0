"""Many utterances on one pipeline: their audio, its order, and the replies that receive it."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from testkit.models.golden import snr_db
from testkit.models.tiny_model import WAIT_SECONDS, demo_tokens, demo_voice
from testkit.replies import (
    FIRST,
    HOP,
    SECOND,
    Counter,
    Expected,
    FakeClock,
    GatedReply,
    Make,
    RecordingReply,
    joined,
    speak,
)
from token2wav import StreamClosedError, Token2Wav, Voice
from token2wav.serving.turn import Turn
from token2wav.serving.utterance import Utterance
from token2wav.serving.worker import WorkerPool

# batches sum in another order than single streams, and phase integrates the difference
SAME_DB = 60


# Audio.


@pytest.mark.parametrize("count", [1, HOP, FIRST, SECOND + 1])
def test_an_utterance_in_one_request_is_that_of_the_library(
    workers: WorkerPool, voice: Voice, expected: Expected, count: int
) -> None:
    reply = speak(workers, voice, count)
    assert np.array_equal(joined(reply), expected(count))
    assert [chunk.index for chunk in reply.chunks] == list(range(len(reply.chunks)))
    assert [chunk.final for chunk in reply.chunks] == [False] * (len(reply.chunks) - 1) + [True]
    assert workers.utterances.open_utterances == 0


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


def test_many_utterances_from_many_threads_equal_the_library(
    workers: WorkerPool, model: Token2Wav
) -> None:
    closed = Counter()
    voices = [demo_voice(count) for count in (5, 25)]
    counts = (1, 12, 40)
    tokens = {n: demo_tokens(n) for n in counts}
    references = {
        (v, n): model.synthesize(tokens[n], voices[v]) for v in range(len(voices)) for n in counts
    }
    failures: list[str] = []

    def client(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(2):
            v, n = generator.randrange(len(voices)), generator.choice(counts)
            utterance = workers.utterances.open(voices[v], closed)
            replies, at = [], 0
            while at < n:
                portion = generator.randint(1, 15)
                replies.append(RecordingReply())
                workers.utterances.push(
                    utterance, tokens[n][at : at + portion], replies[-1], end=at + portion >= n
                )
                at += portion
            if snr_db(joined(*replies), references[v, n]) < SAME_DB:
                failures.append(f"voice {v}, {n} tokens, seed {seed}")

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert closed.count == 12


# Order.


def test_first_chunks_go_before_second_ones(make: Make, voice: Voice) -> None:
    # no listener falls silent meanwhile, and goes first
    workers, journal = make(clock=FakeClock()), list[str]()
    a, b, c = GatedReply("a", journal), RecordingReply("b", journal), RecordingReply("c", journal)
    speak(workers, voice, SECOND, a)
    assert a.reached.wait(WAIT_SECONDS)
    speak(workers, voice, SECOND, b)
    speak(workers, voice, SECOND, c)
    a.gate.set()
    for reply in (a, b, c):
        reply.succeeded()
    # Then the stream with the longest wait goes first, so that no stream falls behind.
    turns = [entry for entry in journal if not entry.endswith("finished")]
    assert turns == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


def test_new_utterances_go_before_half_done_ones(make: Make, voice: Voice) -> None:
    workers, journal = make(clock=FakeClock()), list[str]()
    old, new = GatedReply("old ", journal), RecordingReply("new ", journal)
    utterance = workers.utterances.open(voice)
    workers.utterances.push(utterance, demo_tokens(FIRST), old, end=False)
    assert old.reached.wait(WAIT_SECONDS)
    rest = RecordingReply("rest ", journal)
    workers.utterances.push(utterance, demo_tokens(60), rest, end=True)
    speak(workers, voice, 5, new)
    old.gate.set()
    rest.succeeded()
    assert journal.index("new 0") < journal.index("rest 1")


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


# Replies that stay open.


def test_a_reply_that_is_kept_open_finishes_last(
    workers: WorkerPool, voice: Voice, expected: Expected
) -> None:
    journal: list[str] = []
    open_reply, middle, end = (RecordingReply(name, journal) for name in ("kept", "middle", "end"))
    utterance = workers.utterances.open(voice)
    workers.utterances.push(
        utterance, demo_tokens(30)[:FIRST], open_reply, end=False, keep_open=True
    )
    workers.utterances.push(utterance, demo_tokens(30)[FIRST:], middle, end=False)
    middle.succeeded()
    assert open_reply.outcomes == []
    workers.utterances.push(utterance, [], end, end=True)
    end.succeeded()
    open_reply.succeeded()
    assert journal == ["kept0", "middle finished", "end1", "end finished", "kept finished"]
    assert np.array_equal(joined(open_reply, middle, end), expected(30))


def test_a_kept_reply_that_is_the_only_one_finishes_once(
    workers: WorkerPool, voice: Voice, expected: Expected
) -> None:
    reply = RecordingReply()
    workers.utterances.push(
        workers.utterances.open(voice), demo_tokens(4), reply, end=True, keep_open=True
    )
    assert np.array_equal(joined(reply), expected(4))
    workers.close()
    assert reply.outcomes == ["finished"]


def test_every_kept_reply_is_finished_or_failed_once(workers: WorkerPool, voice: Voice) -> None:
    for end in (True, False):
        replies = [RecordingReply() for _ in range(3)]
        utterance = workers.utterances.open(voice)
        for reply in replies:
            workers.utterances.push(
                utterance, [1], reply, end=end and reply is replies[-1], keep_open=True
            )
        if not end:
            workers.utterances.cancel(utterance)
        for reply in replies:
            reply.wait()
        assert [reply.outcomes for reply in replies] == [["finished" if end else "failed"]] * 3


def test_a_cancelled_open_reply_ends_the_utterance(
    workers: WorkerPool, model: Token2Wav, voice: Voice
) -> None:
    open_reply, middle, closed = RecordingReply(), RecordingReply(), Counter()
    utterance = workers.utterances.open(voice, closed)
    workers.utterances.push(utterance, [1], open_reply, end=False, keep_open=True)
    workers.utterances.push(utterance, [2], middle, end=False)
    middle.succeeded()
    open_reply.cancelled = True
    assert isinstance(open_reply.failed(), StreamClosedError)
    assert closed.count == 1
    assert model.pipeline.open_streams == 0
    with pytest.raises(StreamClosedError):
        workers.utterances.push(utterance, [3], RecordingReply(), end=False)
