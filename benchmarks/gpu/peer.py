"""Section peer: the same chunks on the same device, recomputed as public servers do.

Their way: for every chunk the whole history goes through the estimator and the vocoder again, one request at a time,
without a graph. Ours: all streams in one batch, from the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import spread
from benchmarks.gpu.chunks import load, passes, shortage
from benchmarks.gpu.device import release
from benchmarks.gpu.records import Record
from benchmarks.gpu.settings import Settings
from token2wav import Token2Wav

Times = dict[float, tuple[float, float, float]]  # ms of a batch, median, least and most, by seconds spoken


def peer(folder: Path, settings: Settings, record: Record) -> None:
    """Writes `rows`: chunks per second of both at each history, and the ratio."""
    hop = settings.hops[-1]
    ours, problems = in_a_batch(load(folder, settings), settings, hop)
    release(torch.device(settings.device))
    recompute = load(folder, settings, engine="torch", incremental=False)
    theirs, more = timed(recompute, 1, hop, list(settings.spoken_s), settings)
    problems |= more
    for spoken_s in settings.spoken_s:
        row = compared(settings.peer_streams, ours.get(spoken_s), theirs.get(spoken_s))
        row = {"spoken_s": spoken_s, "hop_tokens": hop, "problem": problems.get(spoken_s), **row}
        record.add("rows", row)
        print(as_line(row), flush=True)


def in_a_batch(model: Token2Wav, settings: Settings, hop: int) -> tuple[Times, dict[float, str]]:
    """Times of a batch of streams at every history that fits the cache, and why others do not."""
    streams = settings.peer_streams
    short = {spoken: shortage(model, streams, round(25 * spoken) + hop) for spoken in settings.spoken_s}
    problems = {spoken: why for spoken, why in short.items() if why}
    fitting = [spoken for spoken in settings.spoken_s if spoken not in problems]
    times, others = timed(model, streams, hop, fitting, settings)
    return times, problems | others


def timed(
    model: Token2Wav, streams: int, hop: int, histories: list[float], settings: Settings
) -> tuple[Times, dict[float, str]]:
    found, problems = passes(model, streams, hop, histories, settings.repeats)
    return {spoken: spread(tuple(sum(each[:2]) for each in times)) for spoken, times in found.items()}, problems


def compared(
    streams: int, ours_ms: tuple[float, float, float] | None, theirs_ms: tuple[float, float, float] | None
) -> dict[str, Any]:
    """Chunks per second of a batch of `streams`, and of one after the other; None of what was not measured."""
    if theirs_ms is None:
        return {"streams": streams} | dict.fromkeys(
            ("recompute_ms", "recompute_per_s", "batch_ms", "batch_per_s", "ratio")
        )
    alone = 1000 / theirs_ms[0]
    row: dict[str, Any] = {"streams": streams, "recompute_ms": theirs_ms, "recompute_per_s": round(alone, 2)}
    if ours_ms is None:
        return row | {"batch_ms": None, "batch_per_s": None, "ratio": None}
    together = 1000 * streams / ours_ms[0]
    return row | {
        "batch_ms": ours_ms,
        "batch_per_s": round(together, 2),
        "ratio": round(together / alone, 2),
    }


def as_line(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return f"{row['spoken_s']:5g} s: {row['problem']}"
    return (
        f"{row['spoken_s']:5g} s: recomputed one by one {row['recompute_per_s']:8.2f} chunks/s, "
        f"{row['streams']} streams in a batch {row['batch_per_s']:8.2f}, {row['ratio']:.1f} times as many"
    )
