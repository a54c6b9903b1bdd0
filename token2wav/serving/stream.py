"""Stream of the library: takes the tokens of one utterance and returns its audio."""

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
    """Stream of one utterance: takes tokens and returns audio. `Token2Wav.stream` creates it.

    N tokens yield `samples_per_token` * N samples (960 * N for CosyVoice3), less the leading
    silence that `StreamConfig.trim_silence_ms` removes. The samples do not depend on how the tokens
    were divided among the calls, except for audio of provisional chunks, which is sent before its
    attention block is complete.

    The memory of a stream is freed when the stream ends or is cancelled. As a context manager the
    stream is cancelled on exit. If a stream is garbage-collected while it is open, its memory is
    freed by the next call of any stream.

    Only one thread at a time may call `push` and `finish`. Any thread may call `cancel` at any
    time.
    """

    def __init__(self, pipeline: Pipeline, voice: Voice, steps: int = 0) -> None:
        self._pipeline = pipeline
        self._request = pipeline.request(voice, steps)
        pipeline.open(self._request)
        self._forgotten = weakref.finalize(self, pipeline.drop, self._request)
        self._cancelled = False
        self._computing = False  # a stage may write to the memory of the stream
        # Reentrant, because a signal handler may call `cancel` while its own thread has the lock.
        self._lock = threading.RLock()

    def push(self, tokens: ArrayLike) -> list[AudioChunk]:
        """Takes any number of tokens, and returns the chunks that they make possible, often none.

        Args:
            tokens: (n,) integers, or (n, codebooks).

        Raises:
            InputError: a token is outside the vocabulary of the model; the stream is unchanged.
            StreamClosedError: the stream has ended, was cancelled, or is cancelled during the call.
            EngineError: the backend failed; the stream is closed.
        """
        self._check_open()
        return self._run(checked_tokens(tokens, self._pipeline.config), end=False)

    def finish(self, tokens: ArrayLike = ()) -> list[AudioChunk]:
        """Ends the utterance and returns the rest of its audio; the last chunk has `final` set.

        If all tokens of the utterance are passed to this call, the samples are the same as from
        `Token2Wav.synthesize`: no provisional chunk is needed.

        Args:
            tokens: last tokens of the utterance, as for `push`; none by default.

        Raises:
            InputError: a token is outside the vocabulary of the model, and the stream is unchanged;
                or the utterance has no tokens at all, and the stream is closed.
            StreamClosedError: the stream has ended, was cancelled, or is cancelled during the call.
            EngineError: the backend failed; the stream is closed.
        """
        self._check_open()
        return self._run(checked_tokens(tokens, self._pipeline.config), end=True)

    def cancel(self) -> None:
        """Cancels the stream and frees its memory. Safe at any time, from any thread.

        If another thread is in `push` or `finish`, this call returns at once. The other call
        finishes the chunk that it computes now, frees the memory of the stream, and raises
        `StreamClosedError`.
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
        """Ends the stream, and frees its memory now, or when the thread that computes is done."""
        if self._forgotten.detach() is not None and not self._computing:
            self._pipeline.close(self._request)

    def _run(self, tokens: NDArray[np.int32], *, end: bool) -> list[AudioChunk]:
        """Takes checked tokens, and computes the chunks that they make possible."""
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
                if not self._forgotten.alive:  # cancelled during the computation
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
