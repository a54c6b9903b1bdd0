"""Statistics of an utterance's arrival, per chunk and in total, printed as a table or JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from token2wav_client.audio import SAMPLE_RATE, AudioChunk, EndReason, channels_of, decoded
from token2wav_client.errors import OutputError
from token2wav_client.listening import playback_starts, stalls

_PLAYER_BUFFER_S = 0.2  # the server assumes the same value by default
_WINDOW_S = 0.01
_AUDIBLE = 10 ** (-50 / 10)  # mean square of -50 dBFS


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """Timing of one chunk without its audio.

    Attributes that are not listed here have the meaning that `AudioChunk` gives them.

    Attributes:
        samples: samples in a channel of the chunk.
        sound_s: seconds from the start of the chunk to its first audible sound; None if the chunk
            has no audible sound.
    """

    index: int
    samples: int
    arrival_s: float
    latency_s: float
    gap_s: float | None
    sample_rate: int = SAMPLE_RATE
    samples_trimmed: int = 0
    end_reason: EndReason | None = None
    sound_s: float | None = None

    @property
    def duration_s(self) -> float:
        """Duration of the chunk's audio in seconds."""
        return self.samples / self.sample_rate

    @classmethod
    def of(cls, chunk: AudioChunk) -> ChunkTiming:
        """Returns the timing of a chunk without its audio."""
        fields = ("index", "arrival_s", "latency_s", "gap_s", "sample_rate", "samples_trimmed")
        values = {name: getattr(chunk, name) for name in (*fields, "end_reason")}
        return cls(samples=len(chunk.audio), sound_s=_sound_s(chunk), **values)


@dataclass(frozen=True, slots=True)
class UtteranceStats:
    """Statistics of a whole utterance; times are in seconds since its first tokens were sent.

    Attributes:
        chunks: timing of each chunk, in order.
        audio_s: duration of the audio in seconds.
        first_audio_s: arrival of the first chunk.
        first_sound_s: time at which a listener hears the first sound if playback starts with the
            first chunk; None if there is no sound. A sound is 10 ms above -50 dBFS, which is louder
            than the noise of a room and quieter than the quietest consonant.
        trimmed_s: seconds of leading silence that the server removed.
        total_s: arrival of the last chunk.
        real_time_factor: total_s / audio_s (below 1 is faster than playback); None without audio.
        underruns: times that a player which starts 0.2 s after the first chunk runs out
            of audio.
        stalled_s: total time in seconds for which that player waits for audio.
        end_reason: limit of the server that ended the utterance before its last tokens: repeats or
            silence; None if none did.
    """

    chunks: tuple[ChunkTiming, ...]
    audio_s: float
    first_audio_s: float
    first_sound_s: float | None
    trimmed_s: float
    total_s: float
    real_time_factor: float | None
    underruns: int
    stalled_s: float
    end_reason: EndReason | None


def summarize(chunks: Sequence[ChunkTiming]) -> UtteranceStats:
    """Computes the statistics of one or more chunks in their order of arrival."""
    first, last = chunks[0], chunks[-1]
    arrivals = [chunk.arrival_s for chunk in chunks]
    durations = [chunk.duration_s for chunk in chunks]
    audio_s = sum(durations)
    waits = stalls(arrivals, durations, _PLAYER_BUFFER_S)
    sounds = (
        float(start) + chunk.sound_s
        for start, chunk in zip(playback_starts(arrivals, durations), chunks, strict=True)
        if chunk.sound_s is not None
    )
    return UtteranceStats(
        chunks=tuple(chunks),
        audio_s=audio_s,
        first_audio_s=first.arrival_s,
        first_sound_s=next(sounds, None),
        trimmed_s=last.samples_trimmed / last.sample_rate,
        total_s=last.arrival_s,
        real_time_factor=last.arrival_s / audio_s if audio_s else None,
        underruns=len(waits),
        stalled_s=sum(waits, 0.0),
        end_reason=last.end_reason,
    )


def _sound_s(chunk: AudioChunk) -> float | None:
    """Finds the first sound of a chunk: 10 ms above -50 dBFS in any channel. None without one."""
    audio = decoded(chunk.audio, chunk.audio_format)
    audio = audio * np.float32(1.0 if audio.dtype == np.float32 else 1 / 32768)
    window = max(1, round(_WINDOW_S * chunk.sample_rate))
    count = len(audio) // window
    whole = audio[: count * window].reshape(count, window, channels_of(audio))
    audible = np.flatnonzero(np.square(whole).mean(axis=1).max(axis=1) >= _AUDIBLE)
    return int(audible[0]) * window / chunk.sample_rate if audible.size else None


def print_report(text: str, file: TextIO | None = None) -> None:
    """Prints a report, by default on standard output; raises OutputError if that fails."""
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        # Python flushes the remaining buffer at exit and would fail once more. The null device
        # accepts it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())
        raise OutputError(f"report: cannot be written ({error.strerror})") from None


def as_table(stats: UtteranceStats) -> str:
    """Formats statistics as a table: a line per chunk, then the totals."""
    trimmed = f", {_number(stats.trimmed_s)} s of silence trimmed" if stats.trimmed_s else ""
    return "\n".join(
        [
            f"{'chunk':>5}  {'samples':>8}  {'audio s':>8}  {'arrival s':>9}  {'latency s':>9}  "
            f"{'gap s':>8}",
            *(
                f"{chunk.index:>5}  {chunk.samples:>8}  {_number(chunk.duration_s):>8}  "
                f"{_number(chunk.arrival_s):>9}  "
                f"{_number(chunk.latency_s):>9}  {_number(chunk.gap_s):>8}"
                for chunk in stats.chunks
            ),
            f"time to first audio  {_number(stats.first_audio_s)} s",
            f"time to first sound  {_number(stats.first_sound_s)} s{trimmed}",
            f"total                {_number(stats.total_s)} s for {_number(stats.audio_s)} s of "
            f"audio",
            f"real-time factor     {_number(stats.real_time_factor)}",
            f"underruns            {stats.underruns} ({_number(stats.stalled_s)} s of silence) "
            f"with a player buffer of {_PLAYER_BUFFER_S} s",
            *(f"ended by the server  {reason}" for reason in [stats.end_reason] if reason),
        ]
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
