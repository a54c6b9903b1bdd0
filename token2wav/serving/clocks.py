"""Playback of a stream's audio, arrivals of its tokens, and the load of the workers."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable

import numpy as np

# Bound of the mean delay of a chunk. Above it, streams wait for whole attention blocks, because
# provisional chunks would add load and make every chunk slower.
SLOW_SECONDS = 0.2
# Bound of the time in which the workers compute one provisional chunk of each admitted stream.
PROVISIONAL_SECONDS = 0.05
_NEWEST = 0.2  # weight of the latest chunk in the mean delay
_NEWEST_BATCH = 0.05  # smallest weight of the latest batch in the means over batches


class Playback:
    """Playback clock of a listener.

    Attributes:
        plays_until: time at which the listener runs out of audio; None before the first audio.
        sound_since: time at which the first sound is heard by a player without a buffer; None
            before that sound is sent.
        underruns: chunks that were sent after the listener had run out of audio.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, buffer_seconds: float = 0.0
    ) -> None:
        self.now = clock
        self._buffer_seconds = buffer_seconds
        self.started: float | None = None
        self.plays_until: float | None = None
        self.sound_since: float | None = None
        self.seconds_sent = 0.0
        self.underruns = 0

    def sent(self, seconds: float, sound_s: float | None = None) -> float:
        """Records audio that is sent now, with `sound_s` of its `AudioChunk`. Returns the seconds
        between the end of the earlier audio and now; 0 if that audio still plays.
        """
        now, late = self.now(), 0.0
        if self.plays_until is None:
            self.started, self.plays_until = now, now + self._buffer_seconds
        elif now > self.plays_until:
            late, self.plays_until = now - self.plays_until, now
            self.underruns += 1
        if sound_s is not None:
            self.sound_since = max(now, self.plays_until - self._buffer_seconds) + sound_s
        self.plays_until += seconds
        self.seconds_sent += seconds
        return late

    def lead_seconds(self, now: float) -> float:
        """Seconds of audio that the listener has left; infinite before the first audio is sent."""
        return math.inf if self.plays_until is None else self.plays_until - now


class Arrivals:
    """Arrivals of a stream's tokens, for estimates of later arrivals."""

    def __init__(self) -> None:
        self._first_at = self._latest_at = math.nan
        self._gap = 0.0  # seconds between the latest two arrivals
        self._tokens = 0  # tokens after the first arrival

    def add(self, tokens: int, now: float) -> None:
        if math.isnan(self._first_at):
            self._first_at = now
        else:
            self._tokens += tokens
            self._gap = now - self._latest_at
        self._latest_at = now

    def token_seconds(self, now: float) -> float:
        """Returns the mean seconds from one token to the next; 0 until tokens have arrived a second
        time.
        """
        return (now - self._first_at) / self._tokens if self._tokens else 0.0

    def seconds_until_next(self, now: float) -> float:
        return max(0.0, self._latest_at + self._gap - now)


class PipelineLoad:
    """Load of a pipeline's workers: measures the delay of chunks, and limits the streams with
    provisional chunks.

    If tokens arrive at the pace of speech, their stream needs provisional chunks of a few tokens
    each until it ends. Too many such streams would leave listeners without audio. A stream that is
    not admitted begins with a whole hop.

    Attributes:
        delay_seconds: mean time from the decision about a chunk until it is computed.
        block_seconds: the same for chunks of one attention block; 0 before the first one.
    """

    def __init__(self) -> None:
        self.workers = 1
        self.delay_seconds = self.block_seconds = 0.0
        self._provisional = weakref.WeakSet[object]()
        # The count begins at -1, because the first batch of a process is very slow and is not
        # measured.
        self._batches = -1
        self._means = np.zeros(4)

    def delayed(self, seconds: float, *, one_block: bool = False) -> None:
        """Records the delay of a chunk. `one_block` marks a whole chunk of one attention block."""
        # The bound limits the weight of the first chunk of a process, which is very slow.
        seconds = min(seconds, 2 * SLOW_SECONDS)
        self.delay_seconds += _NEWEST * (seconds - self.delay_seconds)
        if one_block:
            weight = _NEWEST if self.block_seconds else 1.0
            self.block_seconds += weight * (seconds - self.block_seconds)

    def record_batch(self, chunks: int, seconds: float) -> None:
        """Records the time of a batch whose chunks are all provisional."""
        self._batches += 1
        if self._batches:
            batch = np.array([chunks, seconds, chunks * chunks, chunks * seconds])
            self._means += max(_NEWEST_BATCH, 1 / self._batches) * (batch - self._means)

    def try_admit_provisional(self, stream: object) -> bool:
        """Returns whether a stream may compute a provisional chunk. It is then admitted until
        `remove` is called.

        No stream is admitted while the mean delay exceeds `SLOW_SECONDS`. Otherwise a stream is
        always admitted if it is admitted already, or if no other stream is.
        """
        if self.delay_seconds > SLOW_SECONDS:
            return False
        streams = len(self._provisional)
        if streams and stream not in self._provisional:
            seconds = self._batch_seconds((streams + 1) / self.workers)
            if not 0 < seconds <= PROVISIONAL_SECONDS:
                return False
        self._provisional.add(stream)
        return True

    @property
    def provisional_streams(self) -> int:
        return len(self._provisional)

    def remove(self, stream: object) -> None:
        self._provisional.discard(stream)

    def _batch_seconds(self, chunks: float) -> float:
        """Estimates the seconds that a batch of `chunks` chunks takes; 0 before a measurement.

        A straight line is fitted to recent batches. If they all had the same number of chunks, it
        passes through the origin.
        """
        if self._batches < 1:
            return 0.0
        mean_chunks, mean_seconds, squares, products = self._means
        spread, together = squares - mean_chunks**2, products - mean_chunks * mean_seconds
        slope = (together + mean_seconds / mean_chunks) / (spread + 1)
        return float(mean_seconds + max(0.0, slope) * (chunks - mean_chunks))
