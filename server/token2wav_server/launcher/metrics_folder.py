"""Folder in which the processes of a server store their metrics, and which the launcher reads.

If the environment of a process has the variable PROMETHEUS_MULTIPROC_DIR, prometheus_client stores
the values of this process in files of the folder, which are mapped into its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client import Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class MetricsFolder(Collector):
    """Metrics of all processes of a server. It is thread-safe.

    After the folder was removed, it has no metrics.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self)

    def values(self, name: str) -> list[float]:
        """Returns the values of one metric, without their labels."""
        return [
            sample.value
            for family in self.collect()
            for sample in family.samples
            if sample.name == name
        ]

    def forget(self, pid: int) -> None:
        """Removes the gauges of a process that has ended. Its counters and histograms remain."""
        with self._lock:
            mark_process_dead(pid, str(self._path))

    def collect(self) -> Iterable[Metric]:
        """Reads all files. `generate_latest` calls this method."""
        # FileNotFoundError: the reaper has removed the files after the end of the server.
        with suppress(FileNotFoundError), self._lock:
            # A file is empty for a moment after its creation, and cannot be read then.
            files = [file for file in self._path.glob("*.db") if file.stat().st_size]
            # Gauges are read first. So if no stream is open, all other values are up to date.
            files.sort(key=lambda file: not file.name.startswith("gauge"))
            return MultiProcessCollector.merge(map(str, files))
        return []
