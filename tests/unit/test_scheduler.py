"""Many utterances on one pipeline: order, limits, endings. Whatever happens, each ends once and frees all it held."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.golden import snr_db
from tests.unit.material import WAIT_SECONDS, FaultyVocoder, demo_tokens, demo_voice, one_line
from token2wav import (
    AudioChunk,
    EngineError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2Wav,
    Token2WavError,
    Voice,
)
from token2wav.config import LimitConfig
from token2wav.scheduler import Scheduler
from token2wav.utterance import Observer, Utterance

Expected = Callable[[int], NDArray[np.float32]]

SAME_DB = 60  # batches sum in another order than single streams, and phase integrates the difference
HOP = 25  # new tokens of the first chunk with the prompt of the fixture `voice`
FIRST = HOP + 3
SECOND = FIRST + 50


class FakeClock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


class RecordingReply:
    """Keeps what it is told and in which order; `journal` may be shared between replies."""

    def __init__(self, name: str = "", journal: list[str] | None = None) -> None:
        self.name = name
        self.journal: list[str] = [] if journal is None else journal
        self.chunks: list[AudioChunk] = []
        self.outcomes: list[str] = []
        self.error: Token2WavError | None = None
        self.over = threading.Event()
        self.cancelled = False

    def send(self, chunk: AudioChunk) -> None:
        assert not self.outcomes, "a chunk after the last word"
        self.chunks.append(chunk)
        self.journal.append(f"{self.name}{chunk.index}")

    def finish(self) -> None:
        self.journal.append(f"{self.name} finished")
        self.outcomes.append("finished")
        self.over.set()

    def fail(self, error: Token2WavError) -> None:
        self.journal.append(f"{self.name} failed")
        self.outcomes.append("failed")
        self.error = error
        self.over.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self) -> None:
        assert self.over.wait(WAIT_SECONDS), f"reply {self.name} was never answered"

    def succeeded(self) -> list[AudioChunk]:
        self.wait()
        assert self.error is None, self.error
        assert self.outcomes == ["finished"]
        return self.chunks

    def failed(self) -> Token2WavError:
        self.wait()
        assert self.outcomes == ["failed"]
        assert self.error is not None
        one_line(self.error)
        return self.error


class GatedReply(RecordingReply):
    """Holds the scheduler's thread inside its first `send` until it is let go."""

    def __init__(self, name: str = "", journal: list[str] | None = None) -> None:
        super().__init__(name, journal)
        self.reached = threading.Event()
        self.gate = threading.Event()

    def send(self, chunk: AudioChunk) -> None:
        super().send(chunk)
        self.reached.set()
        assert self.gate.wait(WAIT_SECONDS)


class BrokenReply(RecordingReply):
    """A client that is gone: whatever is sent to it raises."""

    def send(self, chunk: AudioChunk) -> None:
        raise ConnectionError("gone")

    def finish(self) -> None:
        super().finish()
        raise ConnectionError("gone")

    def fail(self, error: Token2WavError) -> None:
        super().fail(error)
        raise ConnectionError("gone")


class Counter:
    """Counts calls from any thread."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.count += 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def joined(*replies: RecordingReply) -> NDArray[np.float32]:
    return np.concatenate([chunk.audio for reply in replies for chunk in reply.succeeded()])


LIMITS = LimitConfig(
    streams=40, request_tokens=400, stream_tokens=450, queued_requests=50, prompt_tokens=60, idle_seconds=30.0
)

Make = Callable[..., Scheduler]


@pytest.fixture
def make(model: Token2Wav) -> Iterator[Make]:
    """Makes schedulers; afterwards each must be empty, and its thread ends."""
    made: list[Scheduler] = []

    def build(target: Token2Wav = model, clock: Callable[[], float] = time.monotonic, **limits: float) -> Scheduler:
        made.append(Scheduler(target, replace(LIMITS, **limits), clock=clock))  # type: ignore[arg-type]
        return made[-1]

    yield build
    leftovers = [scheduler.open_utterances for scheduler in made]
    for scheduler in made:
        scheduler.close()
    assert leftovers == [0] * len(made)


@pytest.fixture
def scheduler(make: Make) -> Scheduler:
    return make()


def speak(scheduler: Scheduler, voice: Voice, count: int, reply: RecordingReply | None = None) -> RecordingReply:
    """A whole utterance in one request."""
    reply = reply or RecordingReply()
    scheduler.push(scheduler.open(voice), demo_tokens(count), reply, end=True)
    return reply


def assert_serves(scheduler: Scheduler, voice: Voice, expected: Expected) -> None:
    """The scheduler is alive and in order."""
    assert np.array_equal(joined(speak(scheduler, voice, 4)), expected(4))


# What comes out.


@pytest.mark.parametrize("count", [1, HOP, FIRST, SECOND + 1])
def test_an_utterance_in_one_request_is_that_of_the_library(
    scheduler: Scheduler, voice: Voice, expected: Expected, count: int
) -> None:
    reply = speak(scheduler, voice, count)
    assert np.array_equal(joined(reply), expected(count))
    assert [chunk.index for chunk in reply.chunks] == list(range(len(reply.chunks)))
    assert [chunk.final for chunk in reply.chunks] == [False] * (len(reply.chunks) - 1) + [True]
    assert scheduler.open_utterances == 0


def test_every_request_is_answered_in_order_with_the_chunks_it_made_possible(
    scheduler: Scheduler, model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    tokens, journal = demo_tokens(80), list[str]()
    a, b, c, d = (RecordingReply(name, journal) for name in "abcd")
    utterance = scheduler.open(voice)
    scheduler.push(utterance, tokens[:10], a, end=False)
    scheduler.push(utterance, tokens[10:FIRST], b, end=False)
    scheduler.push(utterance, tokens[FIRST:], c, end=False)
    c.wait()
    assert model.pipeline.open_streams == 1
    scheduler.push(utterance, [], d, end=True)
    assert np.array_equal(joined(a, b, c, d), expected(80))
    assert journal == ["a finished", "b0", "b finished", "c1", "c finished", "d2", "d finished"]
    assert utterance.closed


def test_many_utterances_from_many_threads_are_those_of_the_library(scheduler: Scheduler, model: Token2Wav) -> None:
    closed = Counter()
    voices = [demo_voice(count) for count in (5, 25)]
    counts = (1, 12, 40)
    references = {(v, n): model.synthesize(demo_tokens(n), voices[v]) for v in range(len(voices)) for n in counts}
    failures: list[str] = []

    def client(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(2):
            v, n = generator.randrange(len(voices)), generator.choice(counts)
            utterance = scheduler.open(voices[v], closed)
            replies, at = [], 0
            while at < n:
                portion = generator.randint(1, 15)
                replies.append(RecordingReply())
                scheduler.push(utterance, demo_tokens(n)[at : at + portion], replies[-1], end=at + portion >= n)
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


def test_first_chunks_go_before_second_ones(scheduler: Scheduler, voice: Voice) -> None:
    journal: list[str] = []
    a, b, c = GatedReply("a", journal), RecordingReply("b", journal), RecordingReply("c", journal)
    speak(scheduler, voice, SECOND, a)
    assert a.reached.wait(WAIT_SECONDS)
    speak(scheduler, voice, SECOND, b)
    speak(scheduler, voice, SECOND, c)
    a.gate.set()
    for reply in (a, b, c):
        reply.succeeded()
    # Then whoever waited longest, so that nobody falls behind.
    turns = [entry for entry in journal if not entry.endswith("finished")]
    assert turns == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


def test_a_new_utterance_goes_before_an_old_one_that_is_half_done(scheduler: Scheduler, voice: Voice) -> None:
    journal: list[str] = []
    old, new = GatedReply("old ", journal), RecordingReply("new ", journal)
    utterance = scheduler.open(voice)
    scheduler.push(utterance, demo_tokens(FIRST), old, end=False)
    assert old.reached.wait(WAIT_SECONDS)
    rest = RecordingReply("rest ", journal)
    scheduler.push(utterance, demo_tokens(60), rest, end=True)
    speak(scheduler, voice, 5, new)
    old.gate.set()
    rest.succeeded()
    assert journal.index("new 0") < journal.index("rest 1")


# Replies that stay open.


def test_a_reply_that_is_kept_open_finishes_last(scheduler: Scheduler, voice: Voice, expected: Expected) -> None:
    journal: list[str] = []
    kept, middle, end = (RecordingReply(name, journal) for name in ("kept", "middle", "end"))
    utterance = scheduler.open(voice)
    scheduler.push(utterance, demo_tokens(30)[:FIRST], kept, end=False, keep_open=True)
    scheduler.push(utterance, demo_tokens(30)[FIRST:], middle, end=False)
    middle.succeeded()
    assert kept.outcomes == []
    scheduler.push(utterance, [], end, end=True)
    end.succeeded()
    kept.succeeded()
    assert journal == ["kept0", "middle finished", "end1", "end finished", "kept finished"]
    assert np.array_equal(joined(kept, middle, end), expected(30))


def test_a_kept_reply_that_is_the_only_one_finishes_once(
    scheduler: Scheduler, voice: Voice, expected: Expected
) -> None:
    reply = RecordingReply()
    scheduler.push(scheduler.open(voice), demo_tokens(4), reply, end=True, keep_open=True)
    assert np.array_equal(joined(reply), expected(4))
    scheduler.close()
    assert reply.outcomes == ["finished"]


def test_every_kept_reply_is_finished_or_failed_once(scheduler: Scheduler, voice: Voice) -> None:
    for end in (True, False):
        replies = [RecordingReply() for _ in range(3)]
        utterance = scheduler.open(voice)
        for reply in replies:
            scheduler.push(utterance, [1], reply, end=end and reply is replies[-1], keep_open=True)
        if not end:
            scheduler.cancel(utterance)
        for reply in replies:
            reply.wait()
        assert [reply.outcomes for reply in replies] == [["finished" if end else "failed"]] * 3


def test_a_client_that_cancels_its_kept_reply_ends_the_utterance(
    scheduler: Scheduler, model: Token2Wav, voice: Voice
) -> None:
    kept, middle, closed = RecordingReply(), RecordingReply(), Counter()
    utterance = scheduler.open(voice, closed)
    scheduler.push(utterance, [1], kept, end=False, keep_open=True)
    scheduler.push(utterance, [2], middle, end=False)
    middle.succeeded()
    kept.cancelled = True
    assert isinstance(kept.failed(), StreamClosedError)
    assert closed.count == 1
    assert model.pipeline.open_streams == 0
    with pytest.raises(StreamClosedError):
        scheduler.push(utterance, [3], RecordingReply(), end=False)


# Limits, each checked before any work starts.


def test_streams_are_limited_and_a_freed_one_can_be_taken(make: Make, voice: Voice, expected: Expected) -> None:
    scheduler = make(streams=2)
    first, second = scheduler.open(voice), scheduler.open(voice)
    with pytest.raises(LimitError, match=r"^streams: all 2 are in use"):
        scheduler.open(voice)
    scheduler.cancel(first)
    assert_serves(scheduler, voice, expected)
    scheduler.cancel(second)


def test_prompts_are_limited(make: Make) -> None:
    scheduler = make(prompt_tokens=10)
    scheduler.cancel(scheduler.open(demo_voice(10)))
    with pytest.raises(InputError, match=r"^prompt_tokens: 11 tokens, at most 10"):
        scheduler.open(demo_voice(11))


def test_a_voice_that_does_not_fit_takes_no_place(scheduler: Scheduler, voice: Voice) -> None:
    with pytest.raises(InputError, match=r"^prompt_mel: "):
        scheduler.open(Voice(voice.prompt_tokens, voice.prompt_mel[2:], voice.speaker_embedding))
    assert scheduler.open_utterances == 0


Refused = tuple[type[Token2WavError], str]


def refused(scheduler: Scheduler, utterance: Utterance, tokens: object, *, end: bool = False) -> Token2WavError:
    """The error of a push that must be refused with its reply untouched."""
    reply = RecordingReply()
    with pytest.raises(Token2WavError) as caught:
        scheduler.push(utterance, tokens, reply, end=end)  # type: ignore[arg-type]
    assert reply.journal == []
    one_line(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("tokens", "end", "words"),
    [
        (np.zeros(401, np.int32), False, "tokens: 401 in one request, at most 400 are allowed"),
        ([0, 6561], False, "tokens: 6561 at index 1 is outside the vocabulary 0 to 6560"),
        ([-1], True, "tokens: -1 at index 0 is outside the vocabulary 0 to 6560"),
        ([[1]], False, "tokens: shape (1, 1), expected one dimension"),
        ([0.5], False, "tokens: type float64, expected integers"),
        ([[1], [1, 2]], False, "tokens: not an array"),
        ([], True, "tokens: the utterance ended without any; at least 1 is needed"),
    ],
)
def test_a_bad_request_ends_its_utterance_alone(
    scheduler: Scheduler, voice: Voice, expected: Expected, tokens: object, end: bool, words: str
) -> None:
    closed, other = Counter(), scheduler.open(voice)
    utterance = scheduler.open(voice, closed)
    error = refused(scheduler, utterance, tokens, end=end)
    assert isinstance(error, InputError)
    assert words in str(error)
    assert utterance.closed
    assert closed.count == 1
    assert isinstance(refused(scheduler, utterance, [1]), StreamClosedError)
    assert closed.count == 1
    reply = RecordingReply()
    scheduler.push(other, demo_tokens(4), reply, end=True)
    assert np.array_equal(joined(reply), expected(4))


def test_tokens_of_an_utterance_are_limited_over_all_its_requests(make: Make, voice: Voice) -> None:
    scheduler = make(stream_tokens=30)
    utterance = scheduler.open(voice)
    for count in (20, 10):
        scheduler.push(utterance, demo_tokens(count), reply := RecordingReply(), end=False)
        reply.succeeded()
    assert "tokens: the utterance would exceed 30 tokens" in str(refused(scheduler, utterance, [1]))
    assert utterance.closed


def test_requests_that_wait_are_limited(make: Make, voice: Voice) -> None:
    scheduler = make(queued_requests=2)
    running, waiting = GatedReply(), RecordingReply()
    utterance = scheduler.open(voice)
    scheduler.push(utterance, demo_tokens(FIRST), running, end=False)
    assert running.reached.wait(WAIT_SECONDS)
    scheduler.push(utterance, [1], waiting, end=False)
    error = refused(scheduler, utterance, [1])
    running.gate.set()
    assert isinstance(error, LimitError)
    assert str(error).startswith("requests: 2 of this stream already wait")
    assert running.failed() is error
    assert waiting.failed() is error


def test_what_waits_is_failed_with_the_reason_of_the_refusal(scheduler: Scheduler, voice: Voice) -> None:
    kept = RecordingReply()
    utterance = scheduler.open(voice)
    scheduler.push(utterance, [1, 2], kept, end=False, keep_open=True)
    error = refused(scheduler, utterance, [-5])
    assert kept.failed() is error


def test_tokens_after_the_end_are_refused(scheduler: Scheduler, voice: Voice) -> None:
    running = GatedReply()
    utterance = scheduler.open(voice)
    scheduler.push(utterance, demo_tokens(4), running, end=True)
    assert running.reached.wait(WAIT_SECONDS)
    error = refused(scheduler, utterance, [1])
    running.gate.set()
    assert isinstance(error, StreamClosedError)
    assert "after the end" in str(error)
    assert running.failed() is error


# Endings.


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
    assert isinstance(error, StreamClosedError)
    assert "30 s" in str(error)
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
    assert model.pipeline.open_streams == 0


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


def test_an_observer_sees_utterances_admitted_started_and_ended(model: Token2Wav, voice: Voice) -> None:
    seen: list[tuple[int, int]] = []

    class Onlooker(Observer):
        def changed(self, open_utterances: int) -> None:
            seen.append((open_utterances, model.pipeline.open_streams))

    watched = Scheduler(model, LIMITS, Onlooker())
    try:
        first = watched.open(voice)
        second = watched.open(voice)
        watched.cancel(first)
        reply = RecordingReply()
        watched.push(second, [1], reply, end=True)
        reply.succeeded()
    finally:
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


# Failures.


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


# Shutting down.


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
    running = [thread for thread in threading.enumerate() if thread.name == "token2wav-scheduler"]
    scheduler.close()
    assert len(running) == 1
    assert not running[0].is_alive()
