"""Metrics of model processes, in one process and in a folder that the launcher reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import generate_latest

from testkit.patience import PATIENCE_SECONDS
from token2wav import Token2Wav
from token2wav_server.launcher.metrics_folder import VARIABLE, MetricsFolder
from token2wav_server.metrics import ServerMetrics

# Process with streams. Its argument is its name in the metrics.
STAGE = """
import sys
from prometheus_client import Counter, Histogram
from token2wav_server.metrics import OPEN_STREAMS
OPEN_STREAMS(registry=None).labels(sys.argv[1]).set(3)
Histogram("token2wav_batch_streams", "", registry=None).observe(5)
Counter("token2wav_starts_total", "", ["kind"], registry=None).labels("provisional").inc()
print("recorded", flush=True)
sys.stdin.read()
"""
# The file of the counters cannot grow beyond its first 64 KiB.
FULL_DISK = """
import logging, resource
from types import SimpleNamespace
from token2wav.errors import InputError
from token2wav.stages.stage import CacheUsage
from token2wav_server.metrics import ServerMetrics
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
logging.disable()
load = SimpleNamespace(provisional_streams=0)
metrics = ServerMetrics(SimpleNamespace(usage=CacheUsage, load=load, open_streams=0))
for number in range(1000):
    metrics.refused(InputError(f"field{number}", "wrong"))
metrics.refused(InputError("field0", "wrong"))
print("recorded", flush=True)
"""


@contextmanager
def running(folder: Path, script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a script that stores its metrics in a folder, and waits for its first line."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {VARIABLE: str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def lines(text: bytes, family: str) -> set[str]:
    """Returns the values of a family with their labels, in the text of a metrics port."""
    return set(re.findall(rf"^token2wav_{family}(\S* \S+)$", text.decode(), re.MULTILINE))


def test_metrics_of_several_processes(tmp_path: Path) -> None:
    metrics = MetricsFolder(tmp_path)
    (tmp_path / "counter_1.db").touch()  # of a process that has not written yet
    with running(tmp_path, STAGE, "flow") as flow, running(tmp_path, STAGE, "vocoder"):
        text = metrics.text()
        assert lines(text, "open_streams") == {'{owner="flow"} 3.0', '{owner="vocoder"} 3.0'}
        assert lines(text, "starts") == {'_total{kind="provisional"} 2.0'}
        assert metrics.values("token2wav_batch_streams_count") == [2]
        assert b"pid=" not in text
        assert b"_created" not in text

        flow.kill()
        flow.wait(PATIENCE_SECONDS)
        metrics.forget(flow.pid)
        text = metrics.text()
        assert lines(text, "open_streams") == {'{owner="vocoder"} 3.0'}
        assert '_total{kind="provisional"} 2.0' in lines(text, "starts")
        assert metrics.values("token2wav_batch_streams_count") == [2]


def test_a_folder_that_was_removed_has_no_metrics(tmp_path: Path) -> None:
    metrics = MetricsFolder(tmp_path / "removed")
    assert metrics.text() == b""
    metrics.forget(1)


def test_gauges_are_read_before_all_other_values(tmp_path: Path) -> None:
    """If no stream is open, all other values have to be up to date."""
    with running(tmp_path, STAGE, "flow"):
        kinds = [family.type for family in MetricsFolder(tmp_path).collect()]
    assert len(kinds) == 3
    assert kinds[0] == "gauge"


def test_a_metric_that_fails_harms_no_request(tmp_path: Path) -> None:
    with running(tmp_path, FULL_DISK) as process:
        assert process.wait(PATIENCE_SECONDS) == 0
        counts = MetricsFolder(tmp_path).values("token2wav_refused_total")
    assert 100 < len(counts) < 1000
    assert sorted(counts)[-2:] == [1, 2]


def test_metrics_without_the_launcher(model: Token2Wav) -> None:
    metrics = ServerMetrics(model.pipeline)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(1000):
            threads.submit(metrics.on_batch, [0.01, 0.2], {"flow": 0.1})
    text = generate_latest(metrics.registry)
    assert lines(text, "batch_streams_(?:count|sum)") == {" 1000.0", " 2000.0"}
    assert b"_created" not in text
