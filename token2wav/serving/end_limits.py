"""Limits that end a stream which would not end by itself: equal tokens in a row, and silence.

A language model can fall into a loop: it repeats one token, or tokens that sound like silence,
until it reaches its own limit. Both limits are off by default. Neither changes the audio before the
end, and the end does not depend on the division of tokens into requests or chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from token2wav.config import StreamConfig

WINDOW_MS = 10  # shorter than any sound of speech, longer than a click
# Mean square of a window at -50 dBFS, from which on the window counts as sound. With a lower bound
# the noise of the demo voice counts as sound. With a higher bound soft consonants are cut off.
_AUDIBLE = 10 ** (-50 / 10)


class EndReason(Enum):
    """Limit that ended a stream. The value is the reason in the log, the metrics and the client."""

    REPEATS = "repeats"
    SILENCE = "silence"


@dataclass(frozen=True)
class EndLimits:
    """Limits that end a stream, as in `UtteranceOptions`. 0 stands for no limit."""

    repeats: int = 0
    silence_s: float = 0.0

    @classmethod
    def of(cls, stream: StreamConfig, repeats: int | None, silence_s: float | None) -> EndLimits:
        """Returns the limits of an utterance. None stands for the setting."""
        return cls(
            stream.end_after_repeats if repeats is None else repeats,
            stream.end_after_silence_s if silence_s is None else silence_s,
        )

    def sentence(self, reason: EndReason) -> str:
        """Returns the error for tokens after the end of the stream."""
        cause = {
            EndReason.REPEATS: f"{self.repeats} equal tokens in a row (end_after_repeats)",
            EndReason.SILENCE: f"{self.silence_s:g} s of silence (end_after_silence_s)",
        }[reason]
        return f"stream: {cause} ended it, so it accepts no more tokens"


class RepeatLimit:
    """Limit on equal tokens in a row. A token of several codes is equal if all its codes are."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._latest: NDArray[Any] | None = None
        self._equal = 0  # latest tokens that equal the token before them

    def end(self, tokens: NDArray[Any]) -> int | None:
        """Returns how many of the next tokens (n, *token_shape) belong to the stream; None if all
        do.
        """
        if not self._repeats or not len(tokens):
            return None
        before = tokens[:1] if self._latest is None else self._latest
        rows = np.concatenate((before, tokens)).reshape(len(tokens) + 1, -1)
        equal = (rows[1:] == rows[:-1]).all(axis=1)
        equal[0] &= self._latest is not None
        lengths = _run_lengths(equal, self._equal)
        self._latest, self._equal = tokens[-1:].copy(), int(lengths[-1])
        reached = np.flatnonzero(lengths + 1 >= self._repeats)
        return int(reached[0]) + 1 if reached.size else None


class SilenceLimit:
    """Limit on silence: windows of 10 ms below -50 dBFS in every channel.

    Windows begin at the start of the utterance, whichever audio arrives together.
    """

    def __init__(self, seconds: float, sample_rate: int, channels: int) -> None:
        self._window = window_samples(sample_rate)
        self._windows = max(1, round(seconds * sample_rate / self._window)) if seconds else 0
        self._channels = channels
        self._silent = 0  # latest windows that are silent
        self._undecided = np.zeros((0, channels), np.float32)  # incomplete window

    def end(self, audio: NDArray[np.float32]) -> int | None:
        """Returns how many of the next samples belong to the stream; None if all do. The shape of
        `audio` is (samples,) or (samples, channels).
        """
        if not self._windows:
            return None
        before = len(self._undecided)
        audio = np.concatenate((self._undecided, audio.reshape(-1, self._channels)))
        silent = ~audible(audio, self._window)
        self._undecided = audio[len(silent) * self._window :].copy()
        if not silent.size:
            return None
        lengths = _run_lengths(silent, self._silent)
        self._silent = int(lengths[-1])
        reached = np.flatnonzero(lengths >= self._windows)
        return (int(reached[0]) + 1) * self._window - before if reached.size else None


def window_samples(sample_rate: int) -> int:
    return max(1, round(WINDOW_MS * sample_rate / 1000))


def audible(audio: NDArray[np.float32], window: int) -> NDArray[np.bool_]:
    """Returns (windows,) bool: whether each whole window of audio (samples,) or (samples,
    channels), from -1 to 1, is at or above -50 dBFS in any channel. `window` is its length in
    samples.
    """
    count = len(audio) // window
    windows = audio[: count * window].reshape(count, window, -1 if count else 1)
    return np.square(windows).mean(axis=1).max(axis=1) >= _AUDIBLE


def _run_lengths(flags: NDArray[np.bool_], before: int) -> NDArray[np.int_]:
    """Returns how many True values in a row end at each position of `flags` (n,). `before` True
    values precede the first position.
    """
    index = np.arange(len(flags))
    latest_false = np.maximum.accumulate(np.where(flags, -1 - before, index))
    return index - latest_false
