"""Clocks of a stream: they tell when its tokens come, how long chunks take under load, and when its
audio is heard.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable

import numpy as np

# where chunks take this long, streams wait for whole blocks: more chunks would make all take longer
SLOW_SECONDS = 0.2
# in which the workers compute a chunk for each stream that speaks early, one after the other
EARLY_SECONDS = 0.05
_NEWEST = 0.2  # weight of the latest chunk in the mean delay
_NEWEST_BATCH = 0.05  # of the latest batch in what is known of batches


class Playback:
    """Playback clock of a listener: it knows how much audio was sent, and when that will have been
    heard.

    Args:
        clock: returns monotonic seconds.
        buffer_seconds: audio that the player holds before it starts.

    Attributes:
        now: the clock.
        started, plays_until: times at which the first audio was sent, and the listener runs out of
            it; None before.
        sound_since: time at which a listener who plays at once hears the first sound; None before
            that is sent.
        seconds_sent, seconds_trimmed: audio sent so far, and left out before it.
        underruns: number of chunks that came after the audio before them had ended.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, buffer_seconds: float = 0.0
    ) -> None:
        self.now = clock
        self._buffer_seconds = buffer_seconds
        self.started: float | None = None
        self.plays_until: float | None = None
        self.sound_since: float | None = None
        self.seconds_sent = self.seconds_trimmed = 0.0
        self.underruns = 0

    def sent(self, seconds: float, sound_s: float | None = None, trimmed_s: float = 0.0) -> float:
        """Notes that audio is sent now; returns the seconds for which the listener heard nothing
        before it.

        Args:
            seconds: duration of the audio.
            sound_s: seconds into it at which the first sound is heard; None where that is not in
                it.
            trimmed_s: seconds of audio that were left out before all that was sent.
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
        self.seconds_trimmed = trimmed_s
        return late

    @property
    def lead_seconds(self) -> float:
        """Audio that the listener still has; without end for one that was sent nothing, and so
        cannot run out of it.
        """
        return math.inf if self.plays_until is None else self.plays_until - self.now()


class Arrivals:
    """Arrivals of a stream's tokens: how fast they come, and when the next ones may."""

    def __init__(self) -> None:
        self._first_at = self._latest_at = math.nan
        self._gap = 0.0  # between the latest two
        self._tokens = 0  # after the first

    def add(self, tokens: int, now: float) -> None:
        if math.isnan(self._first_at):
            self._first_at = now
        else:
            self._tokens += tokens
            self._gap = now - self._latest_at
        self._latest_at = now

    def seconds_for(self, tokens: int, now: float) -> float:
        """Returns the time in which as many tokens come, if they go on as they did; 0 while nothing
        is known.
        """
        return tokens * (now - self._first_at) / self._tokens if self._tokens else 0.0

    def seconds_until_next(self, now: float) -> float:
        return max(0.0, self._latest_at + self._gap - now)


class Load:
    """Load of a pipeline's workers: it tells how late chunks come, and who may speak early beside
    those that do.

    At the pace of speech a stream that speaks early needs a provisional chunk of a few tokens again
    and again, until it ends. One that the workers cannot keep up with would only fall silent later,
    so it begins with a whole hop.

    Attributes:
        workers: number of batches that are computed at the same time.
        delay_seconds: time from the decision about a chunk until it is computed.
    """

    def __init__(self) -> None:
        self.workers = 1
        self.delay_seconds = 0.0
        self._early = weakref.WeakSet[object]()
        # that were learned from; the first of all is very slow, and tells nothing
        self._batches = -1
        self._means = np.zeros(4)  # of their chunks, seconds, chunks * chunks, chunks * seconds

    def delayed(self, seconds: float) -> None:
        """Learns how long it took from the decision about a chunk until it was computed."""
        seconds = min(seconds, 2 * SLOW_SECONDS)  # the first of all is very slow
        self.delay_seconds += _NEWEST * (seconds - self.delay_seconds)

    def computed(self, chunks: int, seconds: float) -> None:
        """Learns how long a worker took for a batch of chunks as long as provisional ones, two
        blocks at most.
        """
        self._batches += 1
        if self._batches:
            batch = np.array([chunks, seconds, chunks * chunks, chunks * seconds])
            self._means += max(_NEWEST_BATCH, 1 / self._batches) * (batch - self._means)

    def try_admit_early(self, stream: object) -> bool:
        """Says whether a stream may speak of an incomplete block; if so, it counts until `leave`."""
        if self.delay_seconds > SLOW_SECONDS:
            return False
        others = len(self._early) - (stream in self._early)
        if (
            stream not in self._early
            and others
            and self._batch_seconds((others + 1) / self.workers) > EARLY_SECONDS
        ):
            return False
        self._early.add(stream)
        return True

    def remove(self, stream: object) -> None:
        """Notes that a stream speaks of whole blocks only, or no more."""
        self._early.discard(stream)

    def _batch_seconds(self, chunks: float) -> float:
        """Estimates the time of a batch: on a line through those of late, or in proportion where
        all were alike.
        """
        if self._batches < 1:
            return 0.0
        mean_chunks, mean_seconds, squares, products = self._means
        spread, together = squares - mean_chunks**2, products - mean_chunks * mean_seconds
        slope = (together + mean_seconds / mean_chunks) / (spread + 1)
        return float(mean_seconds + max(0.0, slope) * (chunks - mean_chunks))
