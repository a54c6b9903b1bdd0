"""Stream that users of the library hold: it takes tokens and gives audio."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.errors import EngineError, StreamClosedError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.chunking import checked_tokens
from token2wav.serving.pipeline import Pipeline
from token2wav.voice import Voice


class Stream:
    """Stream of one utterance: it takes tokens and gives audio. `Token2Wav.stream` makes it.

    The audio does not depend on how tokens are portioned: N tokens give 960 * N samples, always the
    same ones, except for audio that was sent before its first attention block was complete, and
    less the silence that `StreamConfig.trim_silence_ms` lets it drop. As a context manager it is
    cancelled on the way out. What it holds is freed when it ends or is cancelled, or, after it was
    dropped, with the next call of any stream.

    One thread at a time calls `push` and `finish`. `cancel` may be called from any thread, at any
    time.
    """

    def __init__(self, pipeline: Pipeline, voice: Voice, steps: int = 0) -> None:
        self._pipeline = pipeline
        self._request = pipeline.request(voice, steps)
        pipeline.open(self._request)
        self._forgotten = weakref.finalize(self, pipeline.drop, self._request)
        self._cancelled = False
        self._computing = False  # the engines may write to what the stream holds
        # reentrant for signal handlers, which cancel in the middle of anything
        self._lock = threading.RLock()

    def push(self, tokens: ArrayLike) -> list[AudioChunk]:
        """Takes any number of tokens and returns the chunks that became ready, often none.

        Args:
            tokens: (n,) integers.

        Raises:
            InputError: a token is not one of the model's; the stream stays as it was.
            StreamClosedError: after `finish` or `cancel`, or because the stream was cancelled
                meanwhile.
            EngineError: the engine failed; the stream is closed.
        """
        self._check_open()
        return self._run(checked_tokens(tokens, self._pipeline.config), end=False)

    def finish(self, tokens: ArrayLike = ()) -> list[AudioChunk]:
        """Ends the utterance and returns the rest of its audio; the last chunk has `final` set.

        A stream that is given all of its tokens here gives the samples of `Token2Wav.synthesize`:
        it knows that there is nothing to speak early for.

        Args:
            tokens: the last ones, as for `push`; none by default.

        Raises:
            InputError: a token is not one of the model's, and the stream stays as it was; or there
                were no tokens at all, and the stream is closed.
            StreamClosedError: after `finish` or `cancel`, or because the stream was cancelled
                meanwhile.
            EngineError: the engine failed; the stream is closed.
        """
        self._check_open()
        return self._run(checked_tokens(tokens, self._pipeline.config), end=True)

    def cancel(self) -> None:
        """Drops the utterance and frees what it holds; harmless at any time, and from any thread.

        While another thread is in `push` or `finish`, this returns at once. That call ends with
        `StreamClosedError` as soon as the chunk is computed that the engines work on, and frees
        what the stream holds.
        """
        with self._lock:
            self._cancelled = self._cancelled or self._forgotten.alive
            self._close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _check_open(self) -> None:
        if not self._forgotten.alive:
            raise StreamClosedError(
                f"stream: it {'was cancelled' if self._cancelled else 'has ended'}"
            )

    def _close(self) -> None:
        """Ends the stream; what it holds is freed now, or by the thread that computes, when it is
        done.
        """
        if self._forgotten.detach() is not None and not self._computing:
            self._pipeline.close(self._request)

    def _run(self, tokens: NDArray[np.int32], *, end: bool) -> list[AudioChunk]:
        """Takes tokens that have been checked, and computes the chunks that they make possible."""
        with self._lock:
            self._check_open()
            self._computing = True
        going_on = False
        try:
            self._request.chunker.push(tokens, end=end)
            chunks = list(self._chunks())
            going_on = not end
            return chunks
        finally:
            with self._lock:
                self._computing = False
                if not self._forgotten.alive:  # it was cancelled meanwhile
                    self._pipeline.close(self._request)
                elif not going_on:
                    self._close()

    def _chunks(self) -> Iterator[AudioChunk]:
        request = self._request
        while request.chunker.next_chunk is not None:
            [result] = self._pipeline.advance([request])
            self._check_open()
            if isinstance(result, EngineError):
                raise result
            if result is not None:
                request.playback.sent(result.duration_s, result.sound_s, result.trimmed_s)
                yield result
            request.chunker.computed(heard=result is not None)
