"""Back-pressure: a language model is read no faster than the client takes the audio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

import anyio
import numpy as np
from numpy.typing import NDArray
from prometheus_client import Gauge

from token2wav_client import AudioChunk

# The speech server closes a stream without tokens (30 s by default), so one batch passes now and
# then.
_KEEP_ALIVE_S = 10.0
# Time without audio after which the speech server may need more tokens for its next chunk. Its
# longest chunks have 8 s, so it needs no more unless its settings are unusual.
_STARVED_S = 15.0
_POLL_S = 1.0
_SLOWEST_TOKEN_S = 0.08  # audio of a token until the first chunk tells it


class Backpressure:
    """Back-pressure of one utterance: tokens wait while their audio is far ahead of the client.

    Tokens pass until the audio of all tokens sent is `ahead_s` longer than the audio that the
    client has taken. If the client waits for audio all the same, because the speech server needs
    more tokens for a chunk, the bound is doubled. So neither side can wait for the other for ever.

    Args:
        ahead_s: seconds of audio.
        held: gauge of the utterances whose tokens wait.
        speed: tempo of the speech.
    """

    def __init__(self, ahead_s: float, held: Gauge, speed: float = 1.0) -> None:
        self._ahead_s = ahead_s
        self._held = held
        self._sent = 0  # tokens
        self._taken_s = 0.0
        self._speed = speed
        self._token_s = _SLOWEST_TOKEN_S / speed
        self._waits_since: float | None = None
        self._change = asyncio.Event()

    @property
    def sent_s(self) -> float:
        """Seconds of audio of the tokens that have passed."""
        return self._sent * self._token_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager in which the client waits for audio."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def take(self, chunk: AudioChunk) -> None:
        self._token_s = chunk.samples_per_token / chunk.sample_rate / self._speed
        self._taken_s += chunk.duration_s
        self._change.set()

    async def hold_back(
        self, batches: AsyncGenerator[NDArray[np.int32], None]
    ) -> AsyncGenerator[NDArray[np.int32], None]:
        """Yields batches of tokens, and reads the next one only when it may pass."""
        async with aclosing(batches):
            async for batch in batches:
                self._sent += len(batch)
                yield batch
                if self._is_ahead():
                    with self._held.track_inprogress():
                        await self._wait()

    def _is_ahead(self) -> bool:
        return self.sent_s - self._taken_s > self._ahead_s

    async def _wait(self) -> None:
        began = time.monotonic()
        while self._is_ahead():
            self._change.clear()
            with anyio.move_on_after(_POLL_S):
                await self._change.wait()
            now = time.monotonic()
            if self._waits_since is not None and now - max(began, self._waits_since) >= _STARVED_S:
                self._ahead_s *= 2
            elif now - began >= _KEEP_ALIVE_S:
                return
