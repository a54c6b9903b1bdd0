"""Stream that users of the library hold: it takes tokens and gives audio."""

from __future__ import annotations

import weakref
from types import TracebackType

from numpy.typing import ArrayLike

from token2wav.errors import EngineError, StreamClosedError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.chunking import checked_tokens
from token2wav.serving.pipeline import Pipeline
from token2wav.voice import Voice


class Stream:
    """Stream of one utterance: it takes tokens and gives audio. `Token2Wav.stream` makes it; one thread at a time.

    The audio does not depend on how tokens are portioned: N tokens give 960 * N samples, always the same ones, less the
    silence that `StreamConfig.trim_silence_ms` lets it drop. As a context manager it is cancelled on the way out; what
    it holds is freed when it ends or is cancelled, or, after it was dropped, with the next call of any stream.
    """

    def __init__(self, pipeline: Pipeline, voice: Voice, steps: int = 0) -> None:
        self._pipeline = pipeline
        self._request = pipeline.request(voice, steps)
        pipeline.open(self._request)
        self._forgotten = weakref.finalize(self, pipeline.drop, self._request)
        self._cancelled = False

    def push(self, tokens: ArrayLike) -> list[AudioChunk]:
        """Takes any number of tokens and returns the chunks that became ready, often none.

        Args:
            tokens: (n,) integers.

        Raises:
            InputError: a token is not one of the model's; the stream stays as it was.
            StreamClosedError: after `finish` or `cancel`.
            EngineError: the engine failed; the stream is closed.
        """
        self._check_open()
        self._request.chunker.push(checked_tokens(tokens, self._pipeline.config))
        return self._run()

    def finish(self) -> list[AudioChunk]:
        """Ends the utterance and returns the rest of its audio; the last chunk has `final` set.

        Raises:
            InputError: there were no tokens; the stream is closed.
            StreamClosedError: after `finish` or `cancel`.
            EngineError: the engine failed; the stream is closed.
        """
        self._check_open()
        try:
            self._request.chunker.push(checked_tokens([], self._pipeline.config), end=True)
            return self._run()
        finally:
            self._close()

    def cancel(self) -> None:
        """Drops the utterance and frees what it holds; harmless at any time."""
        self._cancelled = self._cancelled or self._forgotten.alive
        self._close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _close(self) -> None:
        if self._forgotten.detach() is not None:
            self._pipeline.close(self._request)

    def _check_open(self) -> None:
        if not self._forgotten.alive:
            raise StreamClosedError(f"stream: it {'was cancelled' if self._cancelled else 'has ended'}")

    def _run(self) -> list[AudioChunk]:
        chunks: list[AudioChunk] = []
        request = self._request
        try:
            while request.chunker.next_chunk is not None:
                [result] = self._pipeline.advance([request])
                if isinstance(result, EngineError):
                    raise result
                if result is not None:
                    request.playback.sent(result.duration_s, result.sound_s, result.trimmed_s)
                    chunks.append(result)
                request.chunker.computed(heard=result is not None)
        except BaseException:
            self._close()
            raise
        return chunks
