"""Figures of a load, and the search for the highest rate of utterances without a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.load.clients import Load
from benchmarks.load.listener import Heard, quantiles
from token2wav_client.listening import (
    THRESHOLDS_MS,
    buffered,
    continuity,
    milliseconds,
    stalls,
)

GAPS_S = (0.05, 0.1, 0.2)
LEAST_RATE = 0.125  # utterances per second; a model with gaps at this rate gets no lower one
_LAG_S = 0.01  # largest lag of the clients with which figures of a rate are good

Row = dict[str, Any]


def row(
    mode: str, load: Load, heard: Sequence[Heard], seconds: float, batches: Mapping[str, float]
) -> Row:
    """Computes the figures of a load.

    Args:
        mode: name of the server's mode.
        seconds: time until the last utterance ended.
        batches: sum and number of the sizes of the server's batches.
    """
    recordings = [utterance.recording for utterance in heard]
    complete = [recording for recording in recordings if recording.complete]
    gaps_s = [
        max(stalls(recording.arrivals_s, recording.durations_s, load.buffer_s), default=0.0)
        for recording in complete
    ]
    errors = {
        recording.error or "incomplete audio" for recording in recordings if not recording.complete
    }
    audio_s = sum(recording.audio_s for recording in complete)
    return {
        "mode": mode,
        "load": load.label,
        **asdict(load),
        "utterances": len(heard),
        "complete": len(complete),
        "failed": sorted(errors),
        "first_audio_ms": milliseconds(utterance.after_tokens_s for utterance in heard),
        "first_playable_ms": milliseconds(recording.first_playable_s for recording in complete),
        "first_audible_ms": milliseconds(recording.first_audible_s for recording in complete),
        "leading_silence_ms": milliseconds(recording.leading_silence_s for recording in complete),
        "gap_free_start_ms": milliseconds(recording.gap_free_start_s for recording in complete),
        "scheduling_lag_ms": milliseconds(utterance.lag_s for utterance in heard),
        "underrun_utterances": sum(bool(recording.stalls_s) for recording in recordings),
        **{f"c{ms}": continuity(recordings, ms) for ms in THRESHOLDS_MS},
        **{f"buffer_{ms}": buffered(recordings, ms) for ms in THRESHOLDS_MS},
        "share_without_gaps": {
            f"{gap_s:g} s": round(sum(gap <= gap_s for gap in gaps_s) / max(1, len(gaps_s)), 3)
            for gap_s in GAPS_S
        },
        "audio_seconds_per_second": round(audio_s / seconds, 2),
        "mean_batch": round(batches["sum"] / batches["count"], 2) if batches["count"] else None,
    }


def as_line(result: Row) -> str:
    """Formats the row of a load for the terminal."""
    first, after_tokens, start, lag = (
        quantiles(result[f"{name}_ms"], "p50", "p99")
        for name in ("first_playable", "first_audio", "gap_free_start", "scheduling_lag")
    )
    without_gaps = result["share_without_gaps"]["0.1 s"]
    return (
        f"{result['model']}, {result['mode']}, {result['load']}: {result['complete']} of "
        f"{result['utterances']} complete; p50 / p99 ms: first playable {first}, after its tokens "
        f"{after_tokens}, gap-free start {start}, lag {lag}; buffer 200 "
        f"{result['buffer_200']:.0%}, without gaps {without_gaps:.0%}; "
        f"{result['audio_seconds_per_second']:.1f} s/s, batches of {result['mean_batch']}"
    )


def good(result: Row) -> bool:
    """Returns whether all utterances of a rate were complete and free of gaps."""
    return (
        result["complete"] == result["utterances"]
        and result["buffer_200"] == 1.0
        and result["scheduling_lag_ms"]["p99"] <= 1000 * _LAG_S
    )


def next_rate(rates: Sequence[float], rows: Sequence[Row]) -> float | None:
    """Returns the rate to measure after some rows; None if the search has ended.

    The rates rise until one is not good. If the lowest one is not good, it is halved until a rate
    is good.
    """
    if not rows:
        return min(rates)
    last = float(rows[-1]["utterances_per_s"])
    if all(map(good, rows)):
        return min((rate for rate in rates if rate > last), default=None)
    lower = last / 2
    return None if any(map(good, rows)) or lower < LEAST_RATE else lower


def highest_rate(rows: Sequence[Row]) -> float | None:
    """Returns the highest rate of one model without a gap; None if all rates have gaps."""
    return max((row["utterances_per_s"] for row in rows if good(row)), default=None)
