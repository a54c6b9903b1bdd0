"""Sections that need NVIDIA's tools: memory errors of kernels, and counters of a first chunk."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.gpu.pytest_rows import COMMAND
from benchmarks.gpu.settings import LeftOut, Row, Rows, Settings

_SANITIZERS = ("memcheck", "racecheck")
_KERNELS = (
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_attention.py",
)
_METRICS = (  # time, memory, arithmetic, registers
    "gpu__time_duration.sum",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
)
_MOST_KERNELS = 40  # rows of the table


def sanitizer(folder: Path, settings: Settings, done: Mapping[str, Row]) -> Rows:
    """Runs the tests of the kernels under compute-sanitizer, which reports wrong accesses."""
    program = _found("compute-sanitizer")
    for tool in _SANITIZERS:
        yield tool, partial(_sanitized, [program, "--tool", tool], settings)


def _sanitized(command: list[str], settings: Settings) -> Row:
    # memcheck sees an access beyond a tensor only if every tensor is an allocation of its own
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = subprocess.run(
        [*command, *COMMAND, *_KERNELS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stdout, ended.stderr, flush=True)
    errors = [int(count) for count in re.findall(r"SUMMARY: (\d+) (?:error|hazard)", ended.stdout)]
    if not errors:
        return {"problem": f"no summary: {(ended.stdout + ended.stderr).strip()[-400:]}"}
    return {"errors": sum(errors), "problem": f"{sum(errors)} errors" if sum(errors) else None}


def counters(folder: Path, settings: Settings, done: Mapping[str, Row]) -> Rows:
    """Measures the kernels of a first chunk with Nsight Compute, one after the other.

    Nsight Compute empties caches before each kernel. So a served chunk takes other times.
    """
    program = _found("ncu")
    yield "kernels of a first chunk", partial(_counted, program, folder, settings)


def _counted(program: str, folder: Path, settings: Settings) -> Row:
    command = [program, "--csv", "--page", "raw", "--metrics", ",".join(_METRICS)]
    # A lent machine does not allow a program to lock the clocks of its GPU.
    command += ["--clock-control", "none"]
    command += ["--profile-from-start", "off", "--graph-profiling", "node", "--print-units", "base"]
    command += [sys.executable, "-m", "benchmarks.gpu.first_chunk", str(folder), settings.device]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if ended.returncode or first is None:
        raise LeftOut(f"ncu ended with {ended.returncode}: {ended.stderr.strip()[-200:]}")
    return kernel_counters(lines[first:])


def kernel_counters(lines: Iterable[str]) -> Row:
    """Summarises the CSV of Nsight Compute by the names of the kernels, the slowest first.

    Args:
        lines: lines from the head of the table on. The second line holds the units: nanoseconds,
            percent, and registers.
    """
    kernels: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in csv.DictReader(lines):
        if row["ID"]:  # empty in the line of the units
            kernels[row["Kernel Name"]].append(row)
    rows: list[Row] = []
    for name, calls in kernels.items():
        time, memory, arithmetic, registers = (
            [float((call[metric] or "0").replace(",", "")) for call in calls] for metric in _METRICS
        )
        mean = {
            "memory %": sum(memory) / len(calls),
            "arithmetic %": sum(arithmetic) / len(calls),
        }
        rows.append(
            {"name": name[:120], "ms": round(sum(time) / 1e6, 4), "calls": len(calls)}
            | {label: round(value, 1) for label, value in mean.items()}
            | {"registers": int(max(registers))}
        )
    rows.sort(key=lambda row: row["ms"], reverse=True)
    calls_in_all = sum(len(calls) for calls in kernels.values())
    return {"calls": calls_in_all, "kernels": rows[:_MOST_KERNELS]}


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise LeftOut(f"not installed: {program}")
    return path
