"""Section parity: every engine that this host can run, and every shape that a graph is captured for, against torch.

An engine is compared on the way of a stream, stage by stage (`token2wav-export verify`), in a process of its own, and
timed in passing. What is served is compared in batches (`batches.py`), a captured shape on its own (`buckets.py`).
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.engines import CPU_CASES, CUDA_CASES, Case, Result, lines, run_case
from benchmarks.gpu.batches import check_batches
from benchmarks.gpu.buckets import check_buckets
from benchmarks.gpu.device import release
from benchmarks.gpu.records import Record
from benchmarks.gpu.settings import Settings

_HISTORIES_S = (0.0, 10.0)


def parity(folder: Path, settings: Settings, record: Record) -> None:
    """Writes `engines`, a result each, `batches`, and `buckets`, a row for each shape, filling and precision."""
    for case in cases_of(settings):
        result = in_own_process(folder, case, settings)
        record.add("engines", asdict(result))
        print(*lines(result), sep="\n", flush=True)
    device = torch.device(settings.device)
    for row in check_batches(folder, settings):
        record.add("batches", row)
        print(f"batch of {row['streams']}: {row['note']}", flush=True)
    for precision in ("float32", "float16") if device.type == "cuda" else ("float32",):
        release(device)
        for row in check_buckets(folder, settings, device, precision):
            record.add("buckets", row)
            if row["problem"]:
                print(f"bucket {row['shape']} {precision}, {row['filling']}: {row['problem']}", flush=True)


def cases_of(settings: Settings) -> list[Case]:
    cases = CUDA_CASES if settings.device.startswith("cuda") else CPU_CASES
    return [case for case in cases if not settings.engines or case.engine in settings.engines]


def in_own_process(folder: Path, case: Case, settings: Settings) -> Result:
    """What `benchmarks.engines` says of a case, or how its process ended."""
    histories = [history for history in _HISTORIES_S if history <= max(settings.spoken_s)]
    job = (folder, settings.size, case, settings.device, list(settings.engine_batches), histories)
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        try:
            return pool.submit(run_case, job).result()
        except BrokenProcessPool:
            return Result(settings.size, case, problem="its process died")
