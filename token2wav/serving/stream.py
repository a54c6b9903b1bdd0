"""Stream of the library."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType

from numpy.typing import ArrayLike

from token2wav.errors import InputError, StreamClosedError, Token2WavError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.options import DEFAULTS, UtteranceOptions
from token2wav.serving.pipeline import Pipeline
from token2wav.voice import Voice


class Stream:
    """Stream of one utterance: takes tokens and returns audio. `Token2Wav.stream` creates it.

    N tokens yield `samples_per_token` * N samples (960 * N for CosyVoice3), minus the leading
    silence that `StreamConfig.trim_silence_ms` removes. At another `UtteranceOptions.speed` than 1,
    F mel frames yield the samples of floor(F / speed) frames.

    The samples do not depend on how the tokens were divided among the calls of `push` and `finish`.
    The exceptions are the audio of provisional chunks, which is sent before its attention block is
    complete, and the last samples of a chunk if the last stage holds back less than its look-ahead
    (`StreamConfig.lookahead_frames`).

    The memory of a stream is freed when the stream ends or is cancelled. Used as a context manager,
    the stream is cancelled on exit. If an open stream is garbage-collected, its memory is freed the
    next time that a stream of the same model is opened or computes a chunk.

    Only one thread at a time may call `push` and `finish`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        voice: Voice,
        options: UtteranceOptions = DEFAULTS,
    ) -> None:
        self._pipeline = pipeline
        self._utterance = pipeline.utterance(voice, options)
        # Guards the status of the utterance. The lock is reentrant, because a signal handler may
        # call `cancel` while its own thread holds the lock.
        self._lock = threading.RLock()
        self._utterance.start(threading.get_ident())
        pipeline.open(self._utterance)
        self._utterance.release(pipeline.clock())
        self._drop_if_collected = weakref.finalize(self, pipeline.drop, self._utterance)

    def push(self, tokens: ArrayLike) -> list[AudioChunk]:
        """Takes tokens, and returns the audio of the chunks that they complete, often none.

        Args:
            tokens: (n,) integers, n >= 0, or (n, codebooks); or (n, size) latents.

        Raises:
            InputError: the tokens do not fit the model, have another number of codebooks than the
                first tokens, or are more than the model allows; or another thread is in `push` or
                `finish`. The stream is unchanged.
            StreamClosedError: the stream has ended, was cancelled, or is cancelled during the call.
            BackendError: the backend failed; the stream is closed.
        """
        return self._run(tokens, end=False)

    def finish(self, tokens: ArrayLike = ()) -> list[AudioChunk]:
        """Ends the utterance and returns the rest of its audio; the last chunk has `final` set.

        If all tokens of the utterance are passed to this call, the samples are the same as from
        `Token2Wav.synthesize`, because no provisional chunk is needed.

        Raises:
            InputError: as for `push`; or the utterance has no tokens at all, and the stream is
                closed.
            StreamClosedError, BackendError: as for `push`.
        """
        return self._run(tokens, end=True)

    def cancel(self) -> None:
        """Cancels the stream and frees its memory. Safe at any time, from any thread.

        If another thread is in `push` or `finish`, `cancel` returns at once. The other thread
        completes its present chunk, frees the memory of the stream, and raises `StreamClosedError`.
        """
        with self._lock:
            self._fail(StreamClosedError("stream: it was cancelled"))

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _run(self, tokens: ArrayLike, *, end: bool) -> list[AudioChunk]:
        utterance = self._utterance
        with self._lock:
            utterance.check_open()
            if utterance.owner is not None:
                raise InputError(
                    "stream", "push or finish runs in another thread; call them from one at a time"
                )
            utterance.start(threading.get_ident())
        try:
            array = utterance.checked_tokens(tokens, self._pipeline.config)
            utterance.check_tokens(array)
            try:
                array, end = utterance.within_limits(array, end=end)
                utterance.chunker.push(array, end=end)
                return self._compute()
            except BaseException as error:
                if not isinstance(error, Token2WavError):  # for example KeyboardInterrupt
                    error = StreamClosedError("stream: it was interrupted")
                with self._lock:
                    self._fail(error)
                raise
        finally:
            with self._lock:
                if utterance.chunker.done and not utterance.over:
                    utterance.finish()
                utterance.release(self._pipeline.clock())
                if utterance.over:
                    self._close()

    def _compute(self) -> list[AudioChunk]:
        utterance, chunks = self._utterance, list[AudioChunk]()
        while utterance.chunker.next_chunk is not None:
            [result] = self._pipeline.advance([utterance])
            if isinstance(result, Token2WavError):
                raise result
            with self._lock:
                utterance.hear(result)
                utterance.finish_chunk(result)
            if result is not None:
                chunks.append(result)
        return chunks

    def _fail(self, error: Token2WavError) -> None:
        if not self._utterance.over:
            self._utterance.fail(error)
            # A thread that computes a chunk frees the memory later: a stage may still write to it.
            if self._utterance.owner is None:
                self._close()

    def _close(self) -> None:
        self._drop_if_collected.detach()
        self._pipeline.close(self._utterance)
