"""Mark of synthetic audio for tests: a quiet echo, in blocks. Its sum per sample has two terms, so
that its samples are equal bit by bit however the audio is divided.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 320  # samples, the delay of the echo

Audio = NDArray[np.float32]


def echoed(audio: Audio) -> Audio:
    """Marks a whole utterance: (samples,) or (samples, channels)."""
    before = np.concatenate((np.zeros_like(audio[:BLOCK]), audio))[: len(audio)]
    return audio + np.float32(0.25) * before


class EchoStream:
    def __init__(self, channels: int) -> None:
        shape = (channels,) if channels > 1 else ()
        self._before = np.zeros((BLOCK, *shape), np.float32)
        self._rest = self._before[:0]

    def mark(self, audio: Audio, *, last: bool) -> Audio:
        audio = np.concatenate((self._rest, audio))
        whole = len(audio) if last else len(audio) // BLOCK * BLOCK
        past = np.concatenate((self._before, audio[:whole]))
        self._rest, self._before = audio[whole:], past[len(past) - BLOCK :]
        return audio[:whole] + np.float32(0.25) * past[:whole]


class Echo:
    def open(self, sample_rate: int, channels: int) -> EchoStream:
        if sample_rate < 16_000:
            raise ValueError("an echo needs 16000 or more")
        return EchoStream(channels)
