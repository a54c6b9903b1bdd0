"""Audio chunks of an utterance with their timing, and the usual sample rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

SAMPLE_RATE = 24_000  # of a model in CosyVoice3's format with HiFT, and of servers that don't say theirs
SAMPLES_PER_TOKEN = 960  # as above

AudioFormat = Literal["float32", "int16"]
AudioArray = npt.NDArray[np.float32] | npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True, eq=False)
class AudioChunk:
    """Audio chunk of an utterance: holds its samples and tells when they arrived.

    Attributes:
        audio: samples, mono, shape (samples,), float32 in [-1, 1] or int16.
        index: 0, 1, 2 ... within the utterance.
        final: whether it is the last chunk of the utterance.
        arrival_s: seconds from the sending of the first tokens to the arrival of this chunk.
        latency_s: seconds from the sending of the request that made the chunk possible to its arrival.
            That request is the later of two that the client knows for certain: the one that carried the
            last token heard in the chunk, and the one that the server names as answered by the chunk.
        gap_s: seconds since the previous chunk arrived; None for the first.
        sample_rate: samples per second, as the server says.
        samples_per_token: samples that the whole utterance has for each of its tokens.
    """

    audio: AudioArray
    index: int
    final: bool
    arrival_s: float
    latency_s: float
    gap_s: float | None
    sample_rate: int = SAMPLE_RATE
    samples_per_token: int = SAMPLES_PER_TOKEN

    @property
    def duration_s(self) -> float:
        """Duration of the chunk's audio in seconds."""
        return len(self.audio) / self.sample_rate
