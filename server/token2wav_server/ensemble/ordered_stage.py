"""Queue in front of a stage of the ensemble, which keeps the chunks of each stream in order.

A stage may compute chunks of several streams in one batch, but it must compute the chunks of one
stream one after the other. Triton processes several chunks of a stream at the same time, and passes
them to the next stage in any order. So the queue stores chunks that arrive before their
predecessors. Triton also never reports that a client has disconnected. So the queue closes streams
that receive no chunk for too long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from token2wav.config import LimitConfig
from token2wav.errors import (
    BackendError,
    DeviceLostError,
    StreamClosedError,
    Token2WavError,
    to_public_error,
)
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.worker import LONGEST_CHUNK_TOKENS, hang_seconds

log = logging.getLogger(__name__)

_LONGEST_TICK_S = 1.0


@dataclass(frozen=True)
class Label:
    """Label of a chunk: its stream, and its position in the stream.

    Attributes:
        stream_id: random 63-bit number of the stream, from the accumulator.
        index: number of the chunk within the stream: 0, 1, 2 ...
        last: whether the stream ends with this chunk.
        audio_format: encoding and sample rate of the audio that the client receives.
        admitted: time at which the accumulator admitted the stream, in seconds of the monotonic
            clock, which all processes of a machine share.
    """

    stream_id: int
    index: int
    last: bool
    audio_format: AudioFormat
    admitted: float


@dataclass(frozen=True, eq=False)
class Part:
    """Chunk of a stream, in the queue of a stage.

    Attributes:
        label: stream and position of the chunk.
        content: input of the stage, or the error that ended the stream in an earlier stage.
        answer: callback that receives the result of the chunk, or the error that ended the stream.
            It is called exactly once.
    """

    label: Label
    content: Any
    answer: Callable[[Any], None]


class Stage(Protocol):
    """Interface of a stage, which opens and closes streams and computes batches of chunks."""

    def open(self, label: Label, content: Any) -> Any:
        """Opens a stream, given the label and the content of its first chunk.

        The first chunk itself is computed by `advance`.

        Returns:
            The state of the stream.
        """

    def advance(self, batch: Sequence[tuple[Any, Any]]) -> Sequence[Any]:
        """Computes one chunk for each stream of a batch.

        Args:
            batch: state of each stream, and the content of its chunk.

        Returns:
            The result of each chunk, in the order of the batch. If a result is a BackendError, only
            the stream of this chunk ends.
        """

    def close(self, state: Any) -> None:
        """Releases the state of a stream."""


@dataclass(eq=False)
class _StageStream:
    """Stream in a stage.

    After an error the stream has no state any more. The stage keeps this object until the idle time
    has passed, to answer later chunks of the stream with the same error.

    Attributes:
        last_used: time at which a chunk arrived or was computed, in seconds of the stage's clock.
        next_index: index of the chunk that is computed next.
        state: state that `Stage.open` returned; None before the first chunk and after the end.
        error: error that ended the stream.
        waiting: chunks that have arrived and are not computed yet, by index.
    """

    last_used: float
    next_index: int = 0
    state: Any = None
    error: Token2WavError | None = None
    waiting: dict[int, Part] = field(default_factory=dict)


class OrderedStage:
    """Queue in front of a stage, which lets the stage compute every chunk after its predecessor.

    The class is thread-safe.

    Args:
        limits: limits of the server. The queue uses `idle_seconds`, after which a stream without a
            new chunk is closed, and `batch_streams`, the largest number of streams in a batch.
        on_device_lost: callback that is called when the GPU is lost. After that every batch of this
            process would fail.
        on_hang: callback that `watch` calls if a batch runs for much too long. It receives the
            seconds since the batch began.
        changed: callback that receives the number of streams that hold state, after each change.
        on_batch: callback that receives the number of streams of a batch, before the batch runs.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        stage: Stage,
        limits: LimitConfig,
        *,
        on_device_lost: Callable[[], None] = lambda: None,
        on_hang: Callable[[float], None] = lambda _: None,
        changed: Callable[[int], None] = lambda _: None,
        on_batch: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._limits = limits
        self._changed = changed
        self._on_batch = on_batch
        self._on_device_lost = on_device_lost
        self._on_hang = on_hang
        self._hang_seconds = hang_seconds(limits.batch_streams * LONGEST_CHUNK_TOKENS)
        self._clock = clock
        self._batch_began: float | None = None  # while a batch runs
        self._streams: dict[int, _StageStream] = {}
        self._lock = threading.Lock()

    @property
    def open_streams(self) -> int:
        """Number of streams that hold state."""
        return sum(stream.state is not None for stream in self._streams.values())

    def run(self, parts: Sequence[Part]) -> None:
        """Adds chunks to the queue, and computes every chunk whose predecessors are computed.

        The other chunks stay in the queue until their predecessors arrive.
        """
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
        """Calls `on_hang` if a batch runs for too long.

        This method does not take the lock, because the running batch holds it.
        """
        began = self._batch_began
        if began is not None and (seconds := self._clock() - began) > self._hang_seconds:
            self._on_hang(seconds)

    def expire(self) -> None:
        """Ends streams that were idle for too long.

        A stream that had already failed is removed. Any other stream fails with a
        StreamClosedError.
        """
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
                    StreamClosedError(
                        f"stream: no chunk for {idle_seconds:g} s, so the stream was closed"
                    ),
                )
                stream.last_used = now
            self._changed(self.open_streams)

    def _queue(self, part: Part) -> None:
        label = part.label
        stream = self._streams.setdefault(label.stream_id, _StageStream(self._clock()))
        stream.last_used = self._clock()
        if stream.error is not None:
            _answer(part, stream.error)
        elif label.index < stream.next_index or label.index in stream.waiting:
            _answer(part, StreamClosedError(f"stream: chunk {label.index} was received twice"))
        else:
            stream.waiting[label.index] = part

    def _next_batch(self) -> list[tuple[_StageStream, Part]]:
        """Removes the chunks of the next batch from the queue.

        A batch has one chunk of each stream. First chunks of streams come first, then the chunks of
        streams that have waited longest. Streams beyond the largest batch wait for the next batch.
        """
        ready = [stream for stream in self._streams.values() if stream.next_index in stream.waiting]
        ready.sort(key=lambda stream: (stream.next_index > 0, stream.last_used))
        return [
            (stream, stream.waiting.pop(stream.next_index))
            for stream in ready[: self._limits.batch_streams]
        ]

    def _compute(self, batch: list[tuple[_StageStream, Part]]) -> None:
        runnable = []
        for stream, part in batch:
            try:
                if isinstance(part.content, Token2WavError):
                    raise part.content
                if stream.state is None:
                    stream.state = self._stage.open(part.label, part.content)
                runnable.append((stream, part))
            except Exception as error:
                self._fail(stream, to_public_error(error), part)
        self._changed(self.open_streams)
        results = self._advance([(stream.state, part.content) for stream, part in runnable])
        for (stream, part), result in zip(runnable, results, strict=True):
            if isinstance(result, BackendError):
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
        self._on_batch(len(batch))
        try:
            return self._stage.advance(batch)
        except Exception as error:
            public_error = to_public_error(error)
            if public_error is error:  # otherwise `to_public_error` has logged it
                log.exception("a batch of chunks could not be computed")
            if not isinstance(public_error, BackendError):
                public_error = BackendError(str(public_error))
            return [public_error] * len(batch)

    def _fail(self, stream: _StageStream, error: Token2WavError, *parts: Part) -> None:
        """Ends a stream with an error.

        This method releases the state of the stream, and answers `parts` and all waiting chunks of
        the stream with the error.
        """
        self._free(stream)
        stream.error = error
        if isinstance(error, DeviceLostError):
            self._on_device_lost()
        waiting = [stream.waiting[index] for index in sorted(stream.waiting)]
        stream.waiting.clear()
        for part in (*parts, *waiting):
            _answer(part, error)

    def _free(self, stream: _StageStream) -> None:
        if stream.state is not None:
            self._stage.close(stream.state)
            stream.state = None


def ticker(check: Callable[[], None], idle_seconds: float) -> Callable[[], None]:
    """Starts a thread that calls a function at regular intervals.

    Triton reports neither a client that has disconnected nor a batch that hangs, so the models have
    to check for both.

    Args:
        check: function to call. If it raises an exception, the thread logs it and continues.
        idle_seconds: idle time of streams. The interval is a quarter of this time, but at most 1 s.

    Returns:
        A function that stops the thread and waits for its end.
    """
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(min(_LONGEST_TICK_S, idle_seconds / 4)):
            try:
                check()
            # The thread continues, because the next call may succeed. If the thread ended, streams
            # of disconnected clients would never be closed.
            except Exception:
                log.exception("the check for idle streams or for a batch that hangs failed")

    thread = threading.Thread(target=run, name="token2wav-ticker", daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


def _answer(part: Part, result: Any) -> None:
    """Answers a chunk. If the callback fails, the failure is logged and affects no other stream."""
    try:
        part.answer(result)
    except Exception:
        log.warning("the result of a chunk could not be sent", exc_info=True)
