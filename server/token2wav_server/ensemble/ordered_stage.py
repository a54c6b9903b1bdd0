"""Stage of the ensemble: it computes chunks of many streams in one batch, those of one stream
strictly in order.

Triton runs several chunks of a stream at once, gives them to the next stage in any order, and never
says that a client has gone. So a stage queues what comes too early, and forgets what nobody asks
about any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from token2wav.config import LimitConfig
from token2wav.errors import DeviceLostError, EngineError, StreamClosedError, Token2WavError
from token2wav.serving.audio_output import AudioFormat

log = logging.getLogger(__name__)

_LONGEST_TICK_S = 1.0
# A batch of eight chunks of 100 tokens takes a slow CPU 130 s; a larger batch may take longer in
# proportion.
_HANG_SECONDS = 180.0
_HANG_STREAMS = 8


@dataclass(frozen=True)
class Label:
    """Label of a chunk, which names its stream and its place there."""

    stream_id: int  # number that the accumulator drew at random, never used again
    index: int  # 0, 1, 2 ... within the stream
    last: bool  # whether the stream ends with it
    audio_format: AudioFormat  # what its client wants to be sent


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a stream in a stage: one chunk that waits for its turn."""

    label: Label
    content: Any  # input of the stage, or the error that ended the stream in an earlier one
    # takes what was computed, or the error with which the stream is lost; called once
    answer: Callable[[Any], None]


class Stage(Protocol):
    """Stage that computes: it opens streams, advances them in batches, and closes them."""

    def open(self, label: Label, content: Any) -> Any:
        """Starts a stream with its first chunk, and returns its state."""

    def advance(self, batch: Sequence[tuple[Any, Any]]) -> Sequence[Any]:
        """Runs one chunk of every stream, given as state and content; an EngineError concerns only
        its own stream.
        """

    def close(self, state: Any) -> None:
        """Frees a stream."""


@dataclass(eq=False)
class _Stream:
    """Stream in a stage.

    After an error it stays until it is idle, without state, to tell later chunks of it.
    """

    last_used: float
    next_index: int = 0
    state: Any = None
    error: Token2WavError | None = None
    waiting: dict[int, Part] = field(default_factory=dict)


class OrderedStage:
    """Queue before a stage, which runs every chunk after its predecessor; several threads may use
    it.

    Args:
        stage: computes the batches.
        limits: time without a chunk after which a stream is dropped, and streams in a batch.
        changed: takes the number of streams that hold state, whenever it changes.
        computed: takes the number of streams in a batch before it runs.
        on_device_lost: is called when the process has lost its GPU, and every later batch would
            fail.
        on_hang: is called by `watch` with the seconds for which a batch has run, if it should have
            ended long ago.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        stage: Stage,
        limits: LimitConfig,
        *,
        on_device_lost: Callable[[], None] = lambda: None,
        on_hang: Callable[[float], None] = lambda _: None,
        changed: Callable[[int], None] = lambda _: None,
        computed: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._limits = limits
        self._changed = changed
        self._computed = computed
        self._on_device_lost = on_device_lost
        self._on_hang = on_hang
        self._hang_seconds = _HANG_SECONDS * max(1.0, limits.batch_streams / _HANG_STREAMS)
        self._clock = clock
        self._batch_began: float | None = None  # while a batch runs
        self._streams: dict[int, _Stream] = {}
        self._lock = threading.Lock()

    @property
    def open_streams(self) -> int:
        """Number of streams that hold state."""
        return sum(stream.state is not None for stream in self._streams.values())

    def run(self, parts: Sequence[Part]) -> None:
        """Takes parts and computes those whose predecessors are computed; the others wait for them."""
        with self._lock:
            for part in parts:
                self._queue(part)
            while batch := self._next_batch():
                self._batch_began = self._clock()
                try:
                    self._compute(batch)
                finally:
                    self._batch_began = None
            self._changed(self.open_streams)

    def watch(self) -> None:
        """Calls `on_hang` if a batch has run for too long; takes no lock, because the batch holds
        it.
        """
        began = self._batch_began
        if began is not None and (seconds := self._clock() - began) > self._hang_seconds:
            self._on_hang(seconds)

    def expire(self) -> None:
        """Drops streams that were not used for too long; forgets those that had been lost before."""
        idle_seconds = self._limits.idle_seconds
        with self._lock:
            now = self._clock()
            for stream_id, stream in list(self._streams.items()):
                if now - stream.last_used <= idle_seconds:
                    continue
                if stream.error is not None:
                    del self._streams[stream_id]
                    continue
                self._fail(
                    stream,
                    StreamClosedError(f"stream: no chunk for {idle_seconds:g} s; it was dropped"),
                )
                stream.last_used = now
            self._changed(self.open_streams)

    def _queue(self, part: Part) -> None:
        label = part.label
        stream = self._streams.setdefault(label.stream_id, _Stream(self._clock()))
        stream.last_used = self._clock()
        if stream.error is not None:
            _answer(part, stream.error)
        elif label.index < stream.next_index or label.index in stream.waiting:
            _answer(part, StreamClosedError(f"stream: chunk {label.index} came twice"))
        else:
            stream.waiting[label.index] = part

    def _next_batch(self) -> list[tuple[_Stream, Part]]:
        """Takes the next chunk of every stream that has one: first chunks, then those that have
        waited longest.
        """
        ready = [stream for stream in self._streams.values() if stream.next_index in stream.waiting]
        ready.sort(key=lambda stream: (stream.next_index > 0, stream.last_used))
        return [
            (stream, stream.waiting.pop(stream.next_index))
            for stream in ready[: self._limits.batch_streams]
        ]

    def _compute(self, batch: list[tuple[_Stream, Part]]) -> None:
        runnable = []
        for stream, part in batch:
            try:
                if isinstance(part.content, Token2WavError):
                    raise part.content
                if stream.state is None:
                    stream.state = self._stage.open(part.label, part.content)
                runnable.append((stream, part))
            except Exception as error:
                self._fail(stream, _public_error(error), part)
        self._changed(self.open_streams)
        results = self._advance([(stream.state, part.content) for stream, part in runnable])
        for (stream, part), result in zip(runnable, results, strict=True):
            if isinstance(result, EngineError):
                self._fail(stream, result, part)
                continue
            stream.next_index += 1
            stream.last_used = self._clock()
            _answer(part, result)
            if part.label.last:
                self._free(stream)
                del self._streams[part.label.stream_id]

    def _advance(self, batch: list[tuple[Any, Any]]) -> Sequence[Any]:
        if not batch:
            return []
        self._computed(len(batch))
        try:
            return self._stage.advance(batch)
        except Exception as error:
            log.exception("a batch failed")
            return [
                error if isinstance(error, EngineError) else EngineError(str(_public_error(error)))
            ] * len(batch)

    def _fail(self, stream: _Stream, error: Token2WavError, *failed: Part) -> None:
        """Ends a stream: frees what it holds, and answers the chunk that failed and those that wait
        for it.
        """
        self._free(stream)
        stream.error = error
        if isinstance(error, DeviceLostError):
            self._on_device_lost()
        waiting = [stream.waiting[index] for index in sorted(stream.waiting)]
        stream.waiting.clear()
        for part in (*failed, *waiting):
            _answer(part, error)

    def _free(self, stream: _Stream) -> None:
        if stream.state is not None:
            self._stage.close(stream.state)
            stream.state = None


def ticker(look: Callable[[], None], idle_seconds: float) -> Callable[[], None]:
    """Starts a thread that calls `look` every second, or four times per idle time; returns a
    function that ends it.

    Triton never reports that a client has gone, nor that a batch hangs.
    """
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(min(_LONGEST_TICK_S, idle_seconds / 4)):
            try:
                look()
            # the next call may succeed; without any, abandoned streams would stay for ever
            except Exception:
                log.exception("looking for idle streams or a hanging batch failed")

    thread = threading.Thread(target=run, name="token2wav-ticker", daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


def _answer(part: Part, what: Any) -> None:
    """Answers a chunk; an answer that does not come through harms nobody but its own stream."""
    try:
        part.answer(what)
    except Exception:
        log.warning("a chunk could not be answered", exc_info=True)


def _public_error(error: Exception) -> Token2WavError:
    if isinstance(error, Token2WavError):
        return error
    return EngineError(f"engine: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
