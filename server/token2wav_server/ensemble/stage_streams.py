"""Streams of one stage of the ensemble: opens them, computes batches of their chunks, closes them.

The accumulator sends a chunk of a stream only after the chunk before it was computed in all stages.
So all chunks that arrive can be computed together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from token2wav.errors import (
    BackendError,
    DeviceLostError,
    StreamClosedError,
    Token2WavError,
    to_public_error,
)
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.delivery import attempt
from token2wav.serving.turn import LONGEST_CHUNK_TOKENS, hang_seconds
from token2wav_server.ensemble.links import ACCUMULATOR, send
from token2wav_server.metrics import BATCH_STREAMS, OPEN_STREAMS
from token2wav_server.model_process import end_process

log = logging.getLogger(__name__)

_TICK_S = 0.5
LONGEST_PASSAGE_S = 1.0  # time in which Triton certainly passes a chunk to an idle stage


@dataclass(frozen=True)
class Label:
    """Label of a chunk: its stream, and its position in the stream.

    Attributes:
        stream_id: random 63-bit number of the stream, from the accumulator.
        index: number of the chunk within the stream: 0, 1, 2 ...
        audio_format: encoding and sample rate of the audio that the client receives.
        error_follows: whether the client receives an error after this last chunk, so that its audio
            is not marked as the final one.
    """

    stream_id: int
    index: int
    last: bool
    audio_format: AudioFormat
    error_follows: bool = False


@dataclass(frozen=True, eq=False)
class Part:
    """Chunk of a stream, as a stage receives it.

    Attributes:
        content: input of the stage.
        answer: callback that receives the result of the chunk, or the error that ends the stream.
            It is called exactly once.
    """

    label: Label
    content: Any
    answer: Callable[[Any], None]


class Stage(Protocol):
    """Interface of a stage, which opens and closes streams and computes batches of chunks."""

    def open(self, label: Label, content: Any) -> Any:
        """Opens a stream, given the label and the content of its first chunk, and returns the state
        of the stream. The first chunk itself is computed by `advance`.
        """

    def advance(self, batch: Sequence[tuple[Any, Any]]) -> Sequence[Any]:
        """Computes one chunk for each stream of a batch, from the state of the stream and the
        content of the chunk. If a result is a BackendError, only the stream of this chunk ends.
        """

    def close(self, state: Any) -> None:
        """Releases the state of a stream."""


@dataclass(eq=False)
class _StageStream:
    """Stream in a stage.

    Attributes:
        last_used: time at which a chunk was computed, in seconds of the stage's clock.
        next_index: index of the chunk that is computed next.
    """

    state: Any
    last_used: float
    next_index: int = 0


class StageStreams:
    """Open streams of a stage. Thread-safe.

    Args:
        name: name of the stage's model in Triton, a label of its metrics.
        batch_streams: largest number of chunks in a batch.
        open_seconds: time after which a stream without a chunk is closed. No utterance may be open
            for longer.
    """

    def __init__(
        self,
        name: str,
        stage: Stage,
        batch_streams: int,
        open_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._stage = name, stage
        self._batch_streams, self._open_seconds = batch_streams, open_seconds
        # Without a registry, because the launcher alone exports the metrics of a stage.
        self._open = OPEN_STREAMS(registry=None).labels(name)
        self._batches = BATCH_STREAMS(labelnames=["model"], registry=None).labels(name)
        self._hang_seconds = hang_seconds(batch_streams * LONGEST_CHUNK_TOKENS)
        self._clock = clock
        self._batch_began: float | None = None  # while a batch runs
        self._idle_since = clock()
        self._streams: dict[int, _StageStream] = {}
        self._ended: deque[int] = deque()  # streams to close
        self._lock = threading.Lock()

    @property
    def open_streams(self) -> int:
        """Number of streams that hold state."""
        return len(self._streams)

    def run(self, parts: Sequence[Part]) -> None:
        """Computes chunks, in batches of at most `batch_streams`, and answers them."""
        most = self._batch_streams
        with self._lock:
            self._close_ended()
            for start in range(0, len(parts), most):
                self._batch_began = self._clock()
                try:
                    self._compute(parts[start : start + most])
                finally:
                    self._idle_since, self._batch_began = self._clock(), None
            self._close_ended()

    def close(self, stream_ids: Iterable[int]) -> None:
        """Releases the state of streams that have ended, at once or after the running batch.

        Unknown streams are ignored. The method does not wait for the batch, because the accumulator
        would wait too.
        """
        self._ended.extend(stream_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._close_ended()
            finally:
                self._lock.release()

    def check(self) -> None:
        """Ends this process if a batch runs for too long; tells the accumulator that the stage is
        idle; and closes streams without a chunk for so long that their utterances are over. Only a
        client that sends chunks to a stage directly leaves such streams.

        This method does not wait for the running batch.
        """
        now, began = self._clock(), self._batch_began
        if began is not None and now - began > self._hang_seconds:
            # The accumulator only fails the streams of a batch that hangs. The launcher notices the
            # end of this process, and restarts the server.
            end_process(f"hangs (its batch has run for {now - began:.0f} s)")
        if began is None and now - self._idle_since >= LONGEST_PASSAGE_S:
            send(ACCUMULATOR, {"stage": self._name, "idle_since": now - LONGEST_PASSAGE_S})
        # The call also closes streams that ended just before a batch did.
        oldest = now - self._open_seconds
        self.close([key for key, stream in [*self._streams.items()] if stream.last_used < oldest])

    def _close_ended(self) -> None:
        while self._ended:
            if (stream := self._streams.pop(self._ended.popleft(), None)) is not None:
                self._stage.close(stream.state)
                self._open.set(self.open_streams)

    def _compute(self, parts: Sequence[Part]) -> None:
        runnable = []
        for part in parts:
            try:
                runnable.append((self._stream(part), part))
            except Exception as error:
                self._fail(part, to_public_error(error))
        self._open.set(self.open_streams)
        results = self._advance([(stream.state, part.content) for stream, part in runnable])
        for (stream, part), result in zip(runnable, results, strict=True):
            stream.last_used = self._clock()
            if isinstance(result, BackendError):
                self._fail(part, result)
            else:
                attempt(part.answer, result)

    def _stream(self, part: Part) -> _StageStream:
        """Returns the stream of a chunk, opened if the chunk is its first one."""
        label = part.label
        stream = self._streams.get(label.stream_id)
        index = stream.next_index if stream is not None else 0
        if label.index != index:
            raise StreamClosedError(f"stream: chunk {label.index} arrived instead of chunk {index}")
        if stream is None:
            stream = _StageStream(self._stage.open(label, part.content), self._clock())
            self._streams[label.stream_id] = stream
        stream.next_index += 1
        return stream

    def _advance(self, batch: list[tuple[Any, Any]]) -> Sequence[Any]:
        if not batch:
            return []
        self._batches.observe(len(batch))
        try:
            return self._stage.advance(batch)
        except Exception as error:
            public_error = to_public_error(error)
            if public_error is error:  # otherwise `to_public_error` has logged it
                log.exception("a batch of chunks could not be computed")
            if not isinstance(public_error, BackendError):
                public_error = BackendError(str(public_error))
            return [public_error] * len(batch)

    def _fail(self, part: Part, error: Token2WavError) -> None:
        """Answers a chunk with an error. The accumulator then closes the stream."""
        if isinstance(error, DeviceLostError):
            end_process()
        attempt(part.answer, error)


def ticker(check: Callable[[], None]) -> Callable[[], None]:
    """Starts a thread that calls a function at regular intervals, and returns a function that stops
    the thread.
    """
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(_TICK_S):
            attempt(check)

    thread = threading.Thread(target=run, name="token2wav-ticker", daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop
