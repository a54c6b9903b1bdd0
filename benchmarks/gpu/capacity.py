"""Section streams: how many utterances one device speaks in real time, and what memory each takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.chunks import load
from benchmarks.gpu.device import allocated_bytes, forget_peak, release
from benchmarks.gpu.listeners import listen, voices
from benchmarks.gpu.records import Record
from benchmarks.gpu.settings import Settings, Setup
from token2wav.errors import Token2WavError

UNBROKEN = 0.99  # share of streams that a number is held with
_CLOSE = 0.05  # how far the search may end from the largest number


def streams(folder: Path, settings: Settings, record: Record) -> None:
    """Writes `trials`, each of a number of streams, and `capacity`, a row for each setup."""
    for setup in settings.setups:
        try:
            record.add("capacity", of_setup(folder, setup, settings, record))
        except (Token2WavError, torch.OutOfMemoryError) as error:
            record.add("capacity", {"setup": setup.name, "streams": None, "problem": " ".join(str(error).split())})
        release(torch.device(settings.device))


def of_setup(folder: Path, setup: Setup, settings: Settings, record: Record) -> dict[str, Any]:
    """Searches one setup."""
    model = load(folder, settings, setup.stream, cache_storage=setup.cache_storage)
    device = torch.device(settings.device)
    trials: dict[int, dict[str, Any]] = {}
    for voice in voices(model):  # prompts are shared: their cost is nobody's in particular
        model.synthesize([1, 2, 3], voice)
    before = allocated_bytes(device)

    def held(number: int) -> bool:
        forget_peak(device)
        heard = listen(model, number, settings.stream_s, settings.patience_s)
        usage = model.pipeline.flow.usage()
        trials[number] = {
            "setup": setup.name,
            **heard,
            "cache_mib_per_stream": round(heard["pages_per_stream"] * usage.page_bytes / 2**20, 1),
            "other_mib_per_stream": round((allocated_bytes(device, peak=True) - before) / number / 2**20, 1),
        }
        record.add("trials", trials[number])
        print(as_line(trials[number]), flush=True)
        return heard["unbroken"] >= UNBROKEN

    number = largest(held, settings.fewest_streams, settings.most_streams)
    usage = model.pipeline.flow.usage()
    return {
        "setup": setup.name,
        "streams": number,
        "at_least": number == settings.most_streams,
        "cache_mib": round(usage.capacity * usage.page_bytes / 2**20),
        "problem": None,
        **({"at": trials[number]} if number else {}),
    }


def largest(held: Callable[[int], bool], fewest: int, most: int) -> int:
    """The largest number that is held: doubling, then halving what lies between; within 5 %. 0 if not even one is.

    Args:
        held: tries a number; taken to hold for whatever is less than a number that holds.
        fewest: to try first.
        most: to try at all.
    """
    low, high = 0, min(fewest, most)
    while held(high):
        low = high
        if high == most:
            return most
        high = min(2 * high, most)
    while high - low > max(1, int(_CLOSE * low)):
        middle = (low + high) // 2
        if held(middle):
            low = middle
        else:
            high = middle
    return low


def as_line(trial: dict[str, Any]) -> str:
    first = trial["first_audio_ms"]
    heard = f"first audio {first['p50']:.0f} / {first['p99']:.0f} ms (p50 / p99)" if first else "nothing was heard"
    return (
        f"{trial['setup']}: {trial['streams']:4} streams, {trial['unbroken']:.1%} unbroken, {heard}, batches of "
        f"{trial['mean_batch']}, {trial['cache_mib_per_stream']:.0f} MiB of cache each"
    )
