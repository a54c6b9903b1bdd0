"""Helpers of the scheduler's tests: recording replies, a clock that tests set, and utterances."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from testkit.models.tiny_model import WAIT_SECONDS, demo_tokens, one_line
from token2wav import AudioChunk, Token2WavError, Voice
from token2wav.config import LimitConfig
from token2wav.serving.utterance import Utterance
from token2wav.serving.worker import WorkerPool

Expected = Callable[[int], NDArray[np.float32]]
Make = Callable[..., WorkerPool]

HOP = 25  # new tokens of the first chunk with the prompt of the fixture `voice`
FIRST = HOP + 3
SECOND = FIRST + 50

LIMITS = LimitConfig(streams=40, stream_tokens=900, idle_seconds=30.0)


class FakeClock:
    def __init__(self, now: float = 5000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class RecordingReply:
    """Reply that records its calls in order; several replies may share a `journal`."""

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


class Hanging:
    """Function that blocks its caller until its gate opens."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.gate = threading.Event()

    def __call__(self) -> None:
        self._reached.set()
        assert self.gate.wait(WAIT_SECONDS)

    def wait_until_called(self) -> None:
        assert self._reached.wait(WAIT_SECONDS)


class GatedReply(RecordingReply):
    """Reply that blocks the scheduler's thread inside its first `send` until its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.sending = Hanging()

    def send(self, chunk: AudioChunk) -> None:
        super().send(chunk)
        self.sending()


class BrokenReply(RecordingReply):
    """Reply of a client that is gone: every message raises an error."""

    def send(self, chunk: AudioChunk) -> None:
        raise ConnectionError("gone")

    def finish(self) -> None:
        super().finish()
        raise ConnectionError("gone")

    def fail(self, error: Token2WavError) -> None:
        super().fail(error)
        raise ConnectionError("gone")


class Counter:
    """Counts calls from any thread, with any arguments."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def __call__(self, *_: object) -> None:
        with self._lock:
            self.count += 1


def silence(samples: int = 24_000, rate: int = 24_000) -> AudioChunk:
    """Returns a chunk of silence, whose samples take no memory."""
    audio = np.broadcast_to(np.float32(0), samples)
    return AudioChunk(audio, 0, final=False, sample_rate=rate, samples_per_token=960)


def joined(*replies: RecordingReply) -> NDArray[np.float32]:
    return np.concatenate([chunk.audio for reply in replies for chunk in reply.succeeded()])


def send(
    workers: WorkerPool,
    utterance: Utterance,
    tokens: ArrayLike,
    reply: RecordingReply | None = None,
    *,
    end: bool = False,
    keep_open: bool = False,
) -> RecordingReply:
    """Sends a message of an utterance."""
    reply = reply or RecordingReply()
    workers.utterances.push(utterance, tokens, reply, end=end, keep_open=keep_open)
    return reply


def speak(
    workers: WorkerPool, voice: Voice, count: int, reply: RecordingReply | None = None
) -> RecordingReply:
    """Sends a whole utterance in one message."""
    return send(workers, workers.utterances.open(voice), demo_tokens(count), reply, end=True)


def assert_serves(workers: WorkerPool, voice: Voice, expected: Expected) -> None:
    """Checks that the workers are alive and return correct audio."""
    assert np.array_equal(joined(speak(workers, voice, 4)), expected(4))


def refused(
    workers: WorkerPool, utterance: Utterance, tokens: ArrayLike, *, end: bool = False
) -> Token2WavError:
    """Returns the error of a push that must be rejected without a call of its reply."""
    reply = RecordingReply()
    with pytest.raises(Token2WavError) as caught:
        workers.utterances.push(utterance, tokens, reply, end=end)
    assert reply.journal == []
    one_line(caught.value)
    return caught.value
