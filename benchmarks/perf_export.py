"""Export of perf_analyzer (--profile-export-file), read for the audio that listeners heard.

perf_analyzer itself reports one latency per request. For a model that sends many responses, this is
no latency of a listener (docs/benchmarking.md). The export has the time of every response, and all
data sent and received: 4 MB for an utterance of 7 s. Only the sizes of tensors matter here.
"""

from __future__ import annotations

import json
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from token2wav_client.audio import SAMPLE_RATE
from token2wav_client.listening import stalls
from token2wav_client.listening import summary as quantiles

_TENSOR = re.compile(rb'"(audio|tokens|prompt_tokens|prompt_mel|speaker_embedding)":\[([^\]]*)\]')
_NANOSECONDS = 1e-9


class ExportError(Exception):
    """Error for an incomplete export of perf_analyzer, or for an export of another model."""


@dataclass(frozen=True)
class HeardUtterance:
    """Utterance as its listener heard it: one request and its responses with audio."""

    sent_s: float  # time of the request, on perf_analyzer's clock
    arrivals_s: tuple[float, ...]  # arrival of each chunk, in seconds after the request
    samples: tuple[int, ...]  # of each chunk

    @property
    def audio_s(self) -> float:
        return sum(self.samples) / SAMPLE_RATE

    @property
    def gaps_s(self) -> list[float]:
        """Returns the seconds between each chunk and the next."""
        return np.diff(self.arrivals_s).tolist()

    def silences_s(self, buffer_s: float) -> list[float]:
        """Lists the silences of a player that waits `buffer_s` after the first chunk."""
        lengths = (samples / SAMPLE_RATE for samples in self.samples)
        return stalls(self.arrivals_s, list(lengths), buffer_s)


def stripped(export: Path) -> bytes:
    """Returns the export with the number of values in place of every tensor.

    A stripped export stays unchanged.
    """
    if not export.stat().st_size:
        return b""
    with export.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _TENSOR.sub(_size_instead, data)


def _size_instead(match: re.Match[bytes]) -> bytes:
    name, values = match.groups()
    return b'"%b":%d' % (name, values.count(b",") + 1 if values.strip() else 0)


def read_export(export: Path) -> list[HeardUtterance]:
    """Reads the utterances of a run with one load, in the order in which they were sent.

    Raises:
        ExportError: the export is incomplete, has more than one load, or has no audio.
            (perf_analyzer stops writing without an error if it cannot write a value.)
    """
    try:
        [experiment] = json.loads(stripped(export))["experiments"]
        heard = [_heard(request) for request in experiment["requests"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(
            f"{export}: not a complete export of one load on token2wav ({error!r})"
        ) from error
    if not heard:
        raise ExportError(f"{export}: no requests; perf_analyzer measured no utterance")
    return sorted(heard, key=lambda utterance: utterance.sent_s)


def _heard(request: dict[str, Any]) -> HeardUtterance:
    """Reads one utterance.

    Responses come in order. The last response marks the end of the request and has no audio.
    """
    responses = zip(request["response_timestamps"], request["response_outputs"], strict=True)
    chunks = [(time, output["audio"]) for time, output in responses if output.get("audio")]
    if not chunks:
        raise ValueError("a request without audio")
    times, samples = zip(*chunks, strict=True)
    sent = request["timestamp"]
    return HeardUtterance(
        sent * _NANOSECONDS, tuple((time - sent) * _NANOSECONDS for time in times), samples
    )


def summary(heard: list[HeardUtterance], buffer_s: float) -> dict[str, Any]:
    """Computes the figures of one load, for a player that buffers `buffer_s` seconds of audio."""
    silences = [utterance.silences_s(buffer_s) for utterance in heard]
    ends_s = [utterance.sent_s + utterance.arrivals_s[-1] for utterance in heard]
    audio_s = sum(utterance.audio_s for utterance in heard)
    return {
        "utterances": len(heard),
        "audio_seconds": round(audio_s, 2),
        "first_audio_ms": quantiles([1000 * utterance.arrivals_s[0] for utterance in heard]),
        "gap_ms": quantiles([1000 * gap for utterance in heard for gap in utterance.gaps_s]),
        "whole_ms": quantiles([1000 * utterance.arrivals_s[-1] for utterance in heard]),
        "real_time_factor": quantiles(
            [utterance.arrivals_s[-1] / utterance.audio_s for utterance in heard], digits=3
        ),
        "underruns": sum(map(len, silences)),
        "share_without_underrun": round(sum(not gaps for gaps in silences) / len(heard), 3),
        "silent_seconds": round(sum(map(sum, silences), 0.0), 3),
        "audio_seconds_per_second": round(audio_s / (max(ends_s) - heard[0].sent_s), 2),
    }
