"""Section server: a real tritonserver on the device, under our own load and under perf_analyzer.

It serves with the leanest setup of section streams. The closed loop grows to the number of clients that is asked for;
in the open loop the rate doubles until the server is past its knee.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environment import ROOT
from benchmarks.gpu.chunks import prepare
from benchmarks.gpu.listeners import BUFFER_S, TOKENS_PER_PUSH
from benchmarks.gpu.records import Record
from benchmarks.gpu.settings import Settings
from benchmarks.serving_load import AT_ONCE, PACE, Load, as_line, measure, server_settings

MODE = "batching"
_LATE_MS = 1000.0  # first audio at p99 that is past the knee
_MOST_ARRIVALS_PER_S = 64.0
_UNPACED_CLIENTS = (1, 16)
_PERF_CLIENTS = 16
_PERF_REQUESTS = 32


def server(folder: Path, settings: Settings, record: Record) -> None:
    """Writes `rows`, one for each load, and `perf_analyzer`: its own, or why there are none."""
    prepare(folder, settings)
    common = settings_of(settings)
    record.put("settings", server_settings(MODE, common, BUFFER_S))
    options = argparse.Namespace(
        utterance_seconds=settings.serving_utterance_s,
        tokens_per_request=TOKENS_PER_PUSH,
        buffer_seconds=BUFFER_S,
        seconds=settings.serving_s,
    )
    rows: list[dict[str, Any]] = []
    log = settings.out / "server.log"
    for row in measure(folder, MODE, loads(settings, rows), options, common, log_file=log):
        rows.append(row)
        record.add("rows", row)
        print(as_line(row), flush=True)
    record.put("perf_analyzer", perf_analyzer(folder, settings))


def settings_of(settings: Settings) -> dict[str, Any]:
    """The server's, like those of the last setup that streams are counted with."""
    setup = settings.setups[-1]
    stream = {name: value for name, value in asdict(setup.stream).items() if value != getattr(type(setup.stream), name)}
    runtime = {
        "device": settings.device,
        "engine": settings.engine,
        "precision": settings.precision,
        "cache_mib": settings.cache_mib,
        "cache_storage": setup.cache_storage,
    }
    return {"stream": stream, "runtime": runtime, "limits": {"streams": 2 * max(settings.clients)}}


def loads(settings: Settings, rows: list[dict[str, Any]]) -> Iterator[Load]:
    """Closed loops, paced and then some unpaced; then open ones, until the last of `rows` is past the knee."""
    for clients in settings.clients:
        yield Load(clients, 0.0, PACE)
    for clients in _UNPACED_CLIENTS:
        if clients <= max(settings.clients):
            yield Load(clients, 0.0, AT_ONCE)
    rate = settings.arrivals_per_s
    while rate <= _MOST_ARRIVALS_PER_S:
        yield Load(0, rate, PACE)
        if past_knee(rows[-1]):
            return
        rate *= 2


def past_knee(row: dict[str, Any]) -> bool:
    """Whether a load is more than the server keeps up with."""
    unbroken, late = row["share_without_gaps"]["0.05 s"], row["first_audio_ms"]["p99"]
    return bool(row["failed"]) or unbroken < 0.99 or not late <= _LATE_MS


def perf_analyzer(folder: Path, settings: Settings) -> dict[str, Any]:
    """What `benchmarks.perf_analyzer` measures, where its program is there; nothing is downloaded for it."""
    clients = min(_PERF_CLIENTS, max(settings.clients))
    with tempfile.TemporaryDirectory() as temporary:
        config, out = Path(temporary) / "server.yaml", Path(temporary) / "out"
        config.write_text(yaml.safe_dump(server_settings(MODE, settings_of(settings), BUFFER_S)))
        command = [sys.executable, "-m", "benchmarks.perf_analyzer", "--model", str(folder), "--config", str(config)]
        command += ["--concurrency", "1", str(clients), "--rates", str(settings.arrivals_per_s)]
        command += ["--distributions", "poisson", "--seconds", str(settings.serving_utterance_s)]
        command += ["--requests", str(min(_PERF_REQUESTS, 4 * clients)), "--out", str(out)]
        environment = {**os.environ, "PERF_ANALYZER_DOWNLOAD": "0"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        report = out / "perf_analyzer.json"
        if not report.is_file():
            return {"problem": " ".join((done.stderr or done.stdout).split())[-300:]}
        rows = json.loads(report.read_text())["rows"]
    return {"problem": next((row["failed"] for row in rows if row["failed"]), None), "rows": rows}
