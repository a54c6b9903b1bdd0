"""The statistics of an utterance as a person or a program reads them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TextIO

from token2wav_client.errors import OutputError
from token2wav_client.stats import ChunkTiming, UtteranceStats

_HEAD = f"{'chunk':>5}  {'samples':>8}  {'audio s':>8}  {'arrival s':>9}  {'latency s':>9}  {'gap s':>8}"


def tell(text: str, file: TextIO | None = None) -> None:
    """Print a report, by default on standard output.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        # What is left in the buffer would make Python fail once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())
        raise OutputError(f"report: cannot be written ({error.strerror})") from None


def as_json(stats: UtteranceStats) -> str:
    """One JSON object on one line: the fields of UtteranceStats, `chunks` as a list of objects."""
    return json.dumps(asdict(stats))


def as_table(stats: UtteranceStats) -> str:
    """A line per chunk, then the totals."""
    first, total, factor = map(_number, (stats.first_audio_s, stats.total_s, stats.real_time_factor))
    return "\n".join(
        [
            _HEAD,
            *map(_line, stats.chunks),
            f"time to first audio  {first} s",
            f"total                {total} s for {_number(stats.audio_s)} s of audio",
            f"real-time factor     {factor}",
            f"underruns            {stats.underruns} ({_number(stats.stalled_s)} s) if played at once",
        ]
    )


def _line(chunk: ChunkTiming) -> str:
    times = f"{_number(chunk.arrival_s):>9}  {_number(chunk.latency_s):>9}  {_number(chunk.gap_s):>8}"
    return f"{chunk.index:>5}  {chunk.samples:>8}  {_number(chunk.duration_s):>8}  {times}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
