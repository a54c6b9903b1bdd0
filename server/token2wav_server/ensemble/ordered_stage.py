"""Stage of the ensemble: it computes chunks of many streams in one batch, those of one stream strictly in order.

Triton runs several chunks of a stream at once, gives them to the next stage in any order, and never says that a client
has gone. So a stage queues what comes too early, and forgets what nobody asks about any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from token2wav.errors import EngineError, StreamClosedError, Token2WavError
from token2wav.serving.audio_output import AudioFormat

log = logging.getLogger(__name__)

_LONGEST_TICK_S = 1.0

Content = TypeVar("Content")
State = TypeVar("State")
Result = TypeVar("Result")
ContentIn = TypeVar("ContentIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)
ResultIn = TypeVar("ResultIn", contravariant=True)


@dataclass(frozen=True)
class Label:
    """Label of a chunk, which names its stream and its place there.

    Attributes:
        stream_id: number that the accumulator drew at random, never used again.
        index: 0, 1, 2 ... within the stream.
        last: whether the stream ends with it.
        audio_format: what its client wants to be sent.
    """

    stream_id: int
    index: int
    last: bool
    audio_format: AudioFormat


class Reply(Protocol[ResultIn]):
    """Reply for one chunk; one of its two methods is called, once."""

    def send(self, result: ResultIn) -> None:
        """Delivers what was computed."""

    def fail(self, error: Token2WavError) -> None:
        """Says that the stream is lost, and why."""


@dataclass(frozen=True, eq=False)
class Part(Generic[Content, Result]):
    """Part of a stream in a stage: one chunk that waits for its turn.

    Attributes:
        label: stream and place of the chunk.
        content: input of the stage, or the error that ended the stream in an earlier one.
        reply: takes the answer.
    """

    label: Label
    content: Content | Token2WavError
    reply: Reply[Result]


class Stage(Protocol[ContentIn, State, ResultOut]):
    """Stage that computes: it opens streams, advances them in batches, and closes them."""

    def open(self, content: ContentIn) -> State:
        """Starts a stream with its first chunk."""

    def advance(self, batch: Sequence[tuple[State, ContentIn]]) -> Sequence[ResultOut | EngineError]:
        """Runs one chunk of every stream in the batch; an error concerns only its own stream."""

    def close(self, state: State) -> None:
        """Frees a stream."""


@dataclass(eq=False)
class _Stream(Generic[Content, State, Result]):
    """Stream in a stage. After an error it stays until it is idle, without state, to tell later chunks of it."""

    last_used: float
    next_index: int = 0
    state: State | None = None
    error: Token2WavError | None = None
    waiting: dict[int, Part[Content, Result]] = field(default_factory=dict)


class OrderedStage(Generic[Content, State, Result]):
    """Queue before a stage, which runs every chunk after its predecessor; several threads may use it.

    Args:
        stage: computes the batches.
        idle_seconds: time without a chunk after which a stream is dropped.
        most: largest number of streams in a batch.
        changed: takes the number of streams that hold state, whenever it changes.
        computed: takes the number of streams in a batch before it runs.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        stage: Stage[Content, State, Result],
        idle_seconds: float,
        most: int,
        *,
        changed: Callable[[int], None] = lambda _: None,
        computed: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._idle_seconds = idle_seconds
        self._most = most
        self._changed = changed
        self._computed = computed
        self._clock = clock
        self._streams: dict[int, _Stream[Content, State, Result]] = {}
        self._lock = threading.Lock()

    @property
    def open_streams(self) -> int:
        """Number of streams that hold state."""
        return sum(stream.state is not None for stream in self._streams.values())

    def run(self, parts: Sequence[Part[Content, Result]]) -> None:
        """Takes parts and computes those whose predecessors are computed; the others wait for them."""
        with self._lock:
            for part in parts:
                self._queue(part)
            while batch := self._next_batch():
                self._compute(batch)
            self._changed(self.open_streams)

    def expire(self) -> None:
        """Drops streams that were not used for too long; forgets those that had been lost before."""
        with self._lock:
            now = self._clock()
            for stream_id, stream in list(self._streams.items()):
                if now - stream.last_used <= self._idle_seconds:
                    continue
                if stream.error is not None:
                    del self._streams[stream_id]
                    continue
                self._fail(stream, StreamClosedError(f"stream: no chunk for {self._idle_seconds:g} s; it was dropped"))
                stream.last_used = now
            self._changed(self.open_streams)

    def _queue(self, part: Part[Content, Result]) -> None:
        label = part.label
        stream = self._streams.setdefault(label.stream_id, _Stream(self._clock()))
        stream.last_used = self._clock()
        if stream.error is not None:
            _answer(part.reply.fail, stream.error)
        elif label.index < stream.next_index or label.index in stream.waiting:
            _answer(part.reply.fail, StreamClosedError(f"stream: chunk {label.index} came twice"))
        else:
            stream.waiting[label.index] = part

    def _next_batch(self) -> list[tuple[_Stream[Content, State, Result], Part[Content, Result]]]:
        """Takes the next chunk of every stream that has one: first chunks, then those that have waited longest."""
        ready = [stream for stream in self._streams.values() if stream.next_index in stream.waiting]
        ready.sort(key=lambda stream: (stream.next_index > 0, stream.last_used))
        return [(stream, stream.waiting.pop(stream.next_index)) for stream in ready[: self._most]]

    def _compute(self, batch: list[tuple[_Stream[Content, State, Result], Part[Content, Result]]]) -> None:
        runnable, chunks = [], []
        for stream, part in batch:
            try:
                if isinstance(part.content, Token2WavError):
                    raise part.content
                if stream.state is None:
                    stream.state = self._stage.open(part.content)
            except Exception as error:
                self._fail(stream, _told(error), part)
                continue
            runnable.append((stream, part))
            chunks.append((stream.state, part.content))
        self._changed(self.open_streams)
        for (stream, part), result in zip(runnable, self._advance(chunks), strict=True):
            if isinstance(result, EngineError):
                self._fail(stream, result, part)
                continue
            stream.next_index += 1
            stream.last_used = self._clock()
            _answer(part.reply.send, result)
            if part.label.last:
                self._free(stream)
                del self._streams[part.label.stream_id]

    def _advance(self, batch: list[tuple[State, Content]]) -> Sequence[Result | EngineError]:
        if not batch:
            return []
        self._computed(len(batch))
        try:
            return self._stage.advance(batch)
        except Exception as error:
            log.exception("a batch failed")
            return [EngineError(str(_told(error)))] * len(batch)

    def _fail(
        self, stream: _Stream[Content, State, Result], error: Token2WavError, part: Part[Content, Result] | None = None
    ) -> None:
        """Ends a stream: frees what it holds, and answers the chunk that failed and those that wait for it."""
        self._free(stream)
        stream.error = error
        lost = [] if part is None else [part]
        lost += [stream.waiting[index] for index in sorted(stream.waiting)]
        stream.waiting.clear()
        for each in lost:
            _answer(each.reply.fail, error)

    def _free(self, stream: _Stream[Content, State, Result]) -> None:
        if stream.state is not None:
            self._stage.close(stream.state)
            stream.state = None


class Ticker:
    """Thread that has idle streams looked for, since Triton never says that a client has gone; `stop` ends it.

    Args:
        call: drops idle streams.
        idle_seconds: time after which a stream is idle; it is dropped at most a quarter of that later.
    """

    def __init__(self, call: Callable[[], None], idle_seconds: float) -> None:
        self._call = call
        self._interval_s = min(_LONGEST_TICK_S, idle_seconds / 4)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="token2wav-ticker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._call()
            except Exception:  # the next one has its chance; without any, what is abandoned would stay for ever
                log.exception("looking for idle streams failed")


Told = TypeVar("Told")


def _answer(call: Callable[[Told], None], what: Told) -> None:
    """Answers a chunk; an answer that does not come through harms nobody but its own stream."""
    try:
        call(what)
    except Exception:
        log.warning("a chunk could not be answered", exc_info=True)


def _told(error: Exception) -> Token2WavError:
    if isinstance(error, Token2WavError):
        return error
    return EngineError(f"engine: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
