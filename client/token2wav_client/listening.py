"""Measures of a listener, computed from recordings of utterances by the definitions of the field.

A recording holds when each chunk of an utterance arrived, and how many samples it had. Names that
other benchmarks use have the meaning that these benchmarks give them:

    Nari        nari-labs/benchmarks, tts_bench: audio.py, metrics.py and docs/methodology.md
    sglang-omni sgl-project/sglang-omni, benchmarks/metrics/playback_continuity.py
    vllm-omni   vllm-project/vllm-omni, benchmarks/audio_continuity.py and patch.py
    NVIDIA      performance pages of Riva and of the NIM for text to speech

Measures that only this project has are named differently: gap-free start and buffer.

Time zero is the moment before the client sends the first tokens, or the text. The connection is
open by then (Nari). All times are in seconds, except in `summary`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

THRESHOLDS_MS = (50, 100, 200)  # of sglang-omni's C50, C100 and C200
_WINDOW_S, _HOP_S = 0.02, 0.01
_AUDIBLE = 10 ** (-45 / 20)  # root mean square of -45 dBFS
_DIGITS = 9  # stalls are compared in nanoseconds


@dataclass(frozen=True, eq=False)
class Recording:
    """Recording of an utterance as its client received it, without the audio itself.

    Attributes:
        arrivals_s: (chunks,) arrival of each chunk that has audio, in order, since time zero.
        samples: (chunks,) samples of one channel in each chunk, at least 1.
        sample_rate: samples per second.
        ended_s: end of the response, or the time at which the client gave up, since time zero.
        complete: whether the whole audio arrived.
        onset: samples of one channel before the first audible one, see `audible_onset`; None
            without one.
        began_s: time zero, on a clock that recordings of one load share.
        error: message of the error that ended the utterance; empty without one.
    """

    arrivals_s: Floats
    samples: npt.NDArray[np.int64]
    sample_rate: int
    ended_s: float
    complete: bool = True
    onset: int | None = None
    began_s: float = 0.0
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the fields by name, with lists in place of arrays."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {name: values[name].tolist() for name in ("arrivals_s", "samples")}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Recording:
        """Makes a recording of the values of `as_json`. Raises KeyError, TypeError or ValueError if
        they are no recording.
        """
        try:
            read = {name: _FIELDS[name](value) for name, value in dict(values).items()}
        except OverflowError as error:
            raise ValueError(str(error)) from None
        heard = cls(**read)
        samples, end = heard.samples, int(heard.samples.sum())
        if heard.arrivals_s.shape != samples.shape or samples.ndim != 1:
            raise ValueError(f"{heard.arrivals_s.shape} arrivals of {samples.shape} chunks")
        if not (
            heard.sample_rate > 0
            and (not len(samples) or (samples.min() > 0 and heard.ended_s > 0))
            and (heard.onset is None or 0 <= heard.onset < end)
        ):
            raise ValueError("sample_rate, samples, ended_s or onset is out of range")
        return heard

    @property
    def audio_s(self) -> float:
        """Duration of the audio that arrived."""
        return int(self.samples.sum()) / self.sample_rate

    @cached_property
    def durations_s(self) -> Floats:
        """Duration of each chunk's audio, shape (chunks,)."""
        return self.samples / self.sample_rate

    @property
    def first_playable_s(self) -> float | None:
        """Arrival of the first whole sample (Nari: first playable; NVIDIA: latency to first audio).

        None if no audio arrived.
        """
        return float(self.arrivals_s[0]) if len(self.arrivals_s) else None

    @property
    def first_audible_s(self) -> float | None:
        """Time at which an immediate player plays the first audible sample (Nari: audible TTFA).

        Stalls before this sample count. None without an audible sample.
        """
        if self.onset is None:
            return None
        ends = np.cumsum(self.samples)
        chunk = int(np.searchsorted(ends, self.onset, side="right"))
        within = self.onset - (ends[chunk] - self.samples[chunk])
        start_s = playback_starts(self.arrivals_s, self.durations_s)[chunk]
        return float(start_s + within / self.sample_rate)

    @property
    def leading_silence_s(self) -> float | None:
        """Position of the first audible sample in the audio (Nari). None without one."""
        return None if self.onset is None else self.onset / self.sample_rate

    @property
    def intervals_s(self) -> Floats:
        """Times between chunks that follow each other (NVIDIA), shape (chunks - 1,)."""
        return np.diff(self.arrivals_s)

    @cached_property
    def stalls_s(self) -> list[float]:
        """Stalls of an immediate player (Nari: underruns), see `stalls`."""
        return stalls(self.arrivals_s, self.durations_s)

    @property
    def largest_stall_s(self) -> float | None:
        """Largest stall of an immediate player (sglang-omni: max playback underrun).

        None for an utterance of fewer than two chunks, which sglang-omni does not count.
        """
        return max(self.stalls_s, default=0.0) if len(self.arrivals_s) > 1 else None

    @property
    def real_time_factor(self) -> float | None:
        """Time to the end of the response, divided by the duration of the audio.

        Nari and sglang-omni: RTF; vllm-omni: `audio_rtf`. Below 1, audio is faster than speech.
        None for an incomplete utterance.
        """
        return self.ended_s / self.audio_s if self.complete and self.audio_s else None

    @property
    def streaming_real_time_factor(self) -> float | None:
        """Time from the first chunk to the end of the response, divided by the duration of audio.

        vllm-omni: `streaming_audio_rtf`. None for an incomplete utterance.
        """
        if not self.complete or self.first_playable_s is None:
            return None
        return (self.ended_s - self.first_playable_s) / self.audio_s

    @property
    def gap_free_start_s(self) -> float | None:
        """Earliest start of a player that then plays to the end without a gap.

        A measure of this project. None if no audio arrived.
        """
        if not len(self.arrivals_s):
            return None
        before_s = np.cumsum(self.durations_s) - self.durations_s
        return float((self.arrivals_s - before_s).max())

    @property
    def buffer_s(self) -> float | None:
        """Time that a player must wait after the first chunk to play to the end without a gap.

        A measure of this project. vllm-omni computes the same as `audio_underrun_s`: the clock of
        its player does not stop in a stall. None if no audio arrived.
        """
        if self.gap_free_start_s is None or self.first_playable_s is None:
            return None
        return round(self.gap_free_start_s - self.first_playable_s, _DIGITS)


# Conversions of the values of JSON.
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "arrivals_s": partial(np.array, dtype=np.float64),
    "samples": partial(np.array, dtype=np.int64),
    "sample_rate": int,
    "ended_s": float,
    "complete": bool,
    "onset": lambda value: None if value is None else int(value),
    "began_s": float,
    "error": str,
}


def record(
    chunks: Iterable[tuple[float, npt.NDArray[Any]]],
    sample_rate: int,
    ended_s: float,
    *,
    complete: bool = True,
    began_s: float = 0.0,
    error: str = "",
) -> Recording:
    """Makes a recording of an utterance, with times in whole microseconds.

    Chunks without samples are left out, as Nari does.

    Args:
        chunks: arrival since time zero and audio of each chunk, (samples,) or (samples, channels),
            float32 from -1 to 1 or int16.
    """
    heard = [(arrival_s, audio) for arrival_s, audio in chunks if len(audio)]
    return Recording(
        np.array([arrival_s for arrival_s, _ in heard], np.float64).round(6),
        np.array([len(audio) for _, audio in heard], np.int64),
        sample_rate,
        round(ended_s, 6),
        complete=complete,
        onset=audible_onset(np.concatenate([audio for _, audio in heard]), sample_rate)
        if heard
        else None,
        began_s=round(began_s, 6),
        error=error,
    )


def audible_onset(audio: npt.NDArray[Any], sample_rate: int) -> int | None:
    """Finds the first audible sample by Nari's rule (version 1).

    A window of 20 ms is active if the root mean square of its samples, without their mean, is at
    least -45 dBFS. Windows begin every 10 ms. The onset is the start of the first of two active
    windows in a row. With several channels, a window is active if it is so in any channel.

    Args:
        audio: (samples,) or (samples, channels), float32 from -1 to 1 or int16.

    Returns:
        Samples of one channel before the onset; None without one.
    """
    window, hop = max(1, round(sample_rate * _WINDOW_S)), max(1, round(sample_rate * _HOP_S))
    if len(audio) < window + hop:
        return None
    scale = 32768.0 if audio.dtype.kind == "i" else 1.0
    signal = audio.reshape(len(audio), -1).astype(np.float64) / scale
    starts = np.arange(0, len(audio) - window + 1, hop)
    mean, power = (
        (sums[starts + window] - sums[starts]) / window
        for sums in (
            np.pad(np.cumsum(values, axis=0), ((1, 0), (0, 0))) for values in (signal, signal**2)
        )
    )
    active = np.any(power - mean**2 >= _AUDIBLE**2, axis=1)
    runs = np.flatnonzero(active[:-1] & active[1:])
    return int(starts[runs[0]]) if len(runs) else None


def playback_starts(
    arrivals_s: npt.ArrayLike, durations_s: npt.ArrayLike, hold_s: float = 0.0
) -> Floats:
    """Computes when a player starts to play each chunk, shape (chunks,).

    A chunk that arrives after the audio before it has ended is played on arrival. So the clock of
    the player moves on after a stall.

    Args:
        arrivals_s: (chunks,) arrivals.
        durations_s: (chunks,) durations of the audio.
        hold_s: time from the first arrival to the start of the player; 0 for an immediate player.
    """
    arrivals, durations = (np.asarray(values, np.float64) for values in (arrivals_s, durations_s))
    # Chunk i starts at the latest of arrival j + durations j .. i-1, for all j up to i.
    before = np.cumsum(durations) - durations
    slack = arrivals - before
    if len(slack):
        slack[0] += hold_s
    return np.maximum.accumulate(slack) + before


def stalls(
    arrivals_s: npt.ArrayLike, durations_s: npt.ArrayLike, hold_s: float = 0.0
) -> list[float]:
    """Lists the stalls of a player, one for each time its audio runs out.

    The arguments are those of `playback_starts`.
    """
    starts = playback_starts(arrivals_s, durations_s, hold_s)
    gaps = np.round(np.diff(starts) - np.asarray(durations_s, np.float64)[:-1], _DIGITS)
    return [float(gap) for gap in gaps if gap > 0]


def continuity(recordings: Iterable[Recording], threshold_ms: float) -> float | None:
    """Computes C50, C100 or C200 of sglang-omni, as a share from 0 to 1.

    An utterance passes if its largest single stall is at most the threshold. For example, three
    stalls of 60 ms pass C100. Utterances that are incomplete or have fewer than two chunks are not
    counted.

    Returns:
        The share of utterances that pass; None if none is counted.
    """
    largest = [recording.largest_stall_s for recording in recordings if recording.complete]
    passed = [1000 * stall_s <= threshold_ms for stall_s in largest if stall_s is not None]
    return sum(passed) / len(passed) if passed else None


def buffered(recordings: Iterable[Recording], hold_ms: float) -> float | None:
    """Computes the share of utterances without a gap for a player that holds audio at its start.

    A measure of this project: *buffer 100* for a player that starts 100 ms after the first chunk.
    Incomplete utterances fail, and utterances of one chunk count. For example, three stalls of 60
    ms fail buffer 100 and pass buffer 200.

    Returns:
        A share from 0 to 1; None without recordings.
    """
    passed = [
        recording.complete
        and recording.buffer_s is not None
        and 1000 * recording.buffer_s <= hold_ms
        for recording in recordings
    ]
    return sum(passed) / len(passed) if passed else None


def throughput(recordings: Sequence[Recording]) -> float | None:
    """Computes the seconds of audio that arrived in a second (NVIDIA: RTFX) under one load.

    The time lasts from the first time zero to the end of the last response. None without audio.
    """
    audio_s = sum(recording.audio_s for recording in recordings)
    if not audio_s:
        return None
    end_s = max(recording.began_s + recording.ended_s for recording in recordings)
    return audio_s / (end_s - min(recording.began_s for recording in recordings))


def summary(values: Iterable[float | None], digits: int = 1) -> dict[str, float] | None:
    """Computes mean, p50, p90, p95, p99 and the largest value; None leaves a value out.

    Percentiles are interpolated linearly, as sglang-omni does. Nari takes the nearest rank.

    Returns:
        The figures by name; None without values, for example for the intervals of utterances of one
        chunk.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    percentiles = {f"p{q}": float(np.percentile(numbers, q)) for q in (50, 90, 95, 99)}
    figures = {"mean": float(np.mean(numbers)), **percentiles, "max": float(max(numbers))}
    return {name: round(figure, digits) for name, figure in figures.items()}


def milliseconds(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Computes the figures of `summary` in milliseconds."""
    return summary(None if value is None else 1000 * value for value in seconds)
