"""How an utterance arrived: per chunk and in total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from token2wav_client.audio import SAMPLE_RATE, AudioChunk


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """One chunk's numbers; `arrival_s`, `latency_s`, `gap_s` and `sample_rate` as defined by AudioChunk."""

    index: int
    samples: int
    arrival_s: float
    latency_s: float
    gap_s: float | None
    sample_rate: int = SAMPLE_RATE

    @property
    def duration_s(self) -> float:
        """Seconds of sound."""
        return self.samples / self.sample_rate

    @classmethod
    def of(cls, chunk: AudioChunk) -> ChunkTiming:
        """Keep a chunk's numbers and let go of its audio."""
        return cls(chunk.index, len(chunk.audio), chunk.arrival_s, chunk.latency_s, chunk.gap_s, chunk.sample_rate)


@dataclass(frozen=True, slots=True)
class UtteranceStats:
    """The whole utterance; times are in seconds since its first tokens were sent.

    Attributes:
        chunks: each chunk, in order.
        audio_s: seconds of sound.
        first_audio_s: arrival of the first chunk; None without chunks.
        total_s: arrival of the last chunk; None without chunks.
        real_time_factor: total_s / audio_s (below 1 is faster than playback); None without audio.
        underruns: how often a listener who plays from the first chunk on would have run out of audio.
        stalled_s: how long that listener would have waited, in sum.
    """

    chunks: tuple[ChunkTiming, ...]
    audio_s: float
    first_audio_s: float | None
    total_s: float | None
    real_time_factor: float | None
    underruns: int
    stalled_s: float


def summarize(chunks: Sequence[ChunkTiming]) -> UtteranceStats:
    """Work out the totals of chunks in their order of arrival."""
    audio_s = sum(chunk.duration_s for chunk in chunks)
    first_audio_s = chunks[0].arrival_s if chunks else None
    total_s = chunks[-1].arrival_s if chunks else None
    stalls = _stalls(chunks)
    return UtteranceStats(
        chunks=tuple(chunks),
        audio_s=audio_s,
        first_audio_s=first_audio_s,
        total_s=total_s,
        real_time_factor=total_s / audio_s if total_s is not None and audio_s else None,
        underruns=len(stalls),
        stalled_s=sum(stalls, 0.0),
    )


def _stalls(chunks: Sequence[ChunkTiming]) -> list[float]:
    """Seconds of each silence, if playback starts with the first chunk and resumes with each late one."""
    stalls: list[float] = []
    played_until_s = chunks[0].arrival_s if chunks else 0.0
    for chunk in chunks:
        late_s = chunk.arrival_s - played_until_s
        if late_s > 0:
            stalls.append(late_s)
            played_until_s = chunk.arrival_s
        played_until_s += chunk.duration_s
    return stalls
