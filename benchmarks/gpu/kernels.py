"""Section profile: where the time of one chunk goes, by kernel on a GPU and by operator on a CPU."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.chunk_batch import ChunkBatch
from benchmarks.gpu.chunks import load, shortage
from benchmarks.gpu.records import Record
from benchmarks.gpu.settings import PROMPT_TOKENS, Settings
from benchmarks.streaming_cost import prompt
from token2wav import Token2Wav

_TOP = 15
_HOP = 25
_MOST_STREAMS = 16
# The first that a name matches counts; attention comes first, for its kernels have products in their names.
KINDS = {
    "attention": r"attention|flash|fmha|sdpa|softmax",
    "convolutions": r"conv|winograd|implicit|wgrad|dgrad|im2col",
    "matrix products": r"gemm|gemv|matmul|cutlass|nvjet|addmm|\bmm\b|::mm|bmm|linear|splitk",
    "copies": r"memcpy|memset|copy|cat|index|gather|scatter|clone|fill|stack",
}
OTHER = "elementwise and other"


def kind_of(name: str) -> str:
    """What a kernel or an operator does, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def kernels(folder: Path, settings: Settings, record: Record) -> None:
    """Writes `profiles`: one for each of two batch sizes."""
    model = load(folder, settings)
    spoken = round(25 * settings.spoken_s[min(1, len(settings.spoken_s) - 1)])
    for streams in sorted({min(settings.batches), min(_MOST_STREAMS, max(settings.batches))}):
        if shortage(model, streams, spoken + 3 * _HOP):
            continue
        found = profiled(model, streams, spoken, torch.device(settings.device))
        record.add("profiles", found)
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in found["shares"].items())
        print(
            f"{streams} streams, {_HOP} tokens after {spoken / 25:g} s: {found['wall_ms']:.2f} ms; {shares}", flush=True
        )


def profiled(model: Token2Wav, streams: int, spoken_tokens: int, device: torch.device) -> dict[str, Any]:
    """Of one chunk after others."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with ChunkBatch(model, streams, prompt(PROMPT_TOKENS)) as batch:
        while batch.spoken_tokens < spoken_tokens:
            batch.advance(min(100, spoken_tokens - batch.spoken_tokens) if batch.spoken_tokens else _HOP)
        batch.advance(_HOP)  # of the length that is profiled
        with profile(activities=activities) as profiler:
            start = time.perf_counter()
            batch.advance(_HOP)
            wall_ms = 1000 * (time.perf_counter() - start)
    if device.type == "cuda":
        spans = device_spans(profiler.events() or [])
        by_name: dict[str, float] = defaultdict(float)
        for name, begin, end in spans:
            by_name[name] += end - begin
        calls = Counter(name for name, _, _ in spans)
        idle_ms = gaps_ms([(begin, end) for _, begin, end in spans])
    else:
        averages = profiler.key_averages()
        by_name = {event.key: event.self_cpu_time_total / 1000 for event in averages}
        calls = Counter({event.key: event.count for event in averages})
        idle_ms = max(0.0, wall_ms - sum(by_name.values()))
    return summary(by_name, calls, idle_ms) | {
        "streams": streams,
        "spoken_s": spoken_tokens / 25,
        "hop_tokens": _HOP,
        "wall_ms": round(wall_ms, 3),
    }


def device_spans(events: Iterable[Any]) -> list[tuple[str, float, float]]:
    """(name, begin, end) in ms of what ran on the GPU; annotations that span kernels are left out."""
    return [
        (event.name, event.time_range.start / 1000, event.time_range.end / 1000)
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def summary(by_name: Mapping[str, float], calls: Counter[str], idle_ms: float) -> dict[str, Any]:
    """The longest ones, and each kind's share of busy and idle time together."""
    kinds = dict.fromkeys((*KINDS, OTHER), 0.0)
    for name, ms in by_name.items():
        kinds[kind_of(name)] += ms
    kinds["gaps"] = idle_ms
    whole = sum(kinds.values()) or 1.0
    return {
        "busy_ms": round(sum(by_name.values()), 3),
        "idle_ms": round(idle_ms, 3),
        "calls": sum(calls.values()),
        "shares": {kind: round(ms / whole, 4) for kind, ms in kinds.items()},
        "top": [
            {"name": name[:160], "ms": round(ms, 4), "calls": calls[name], "share": round(ms / whole, 4)}
            for name, ms in sorted(by_name.items(), key=itemgetter(1), reverse=True)[:_TOP]
        ],
    }


def gaps_ms(spans: Iterable[tuple[float, float]]) -> float:
    """Time within the whole in which nothing runs, of spans (begin, end)."""
    idle, until = 0.0, None
    for begin, end in sorted(spans):
        if until is not None and begin > until:
            idle += begin - until
        until = end if until is None else max(until, end)
    return idle
