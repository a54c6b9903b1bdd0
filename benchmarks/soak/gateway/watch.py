"""Observation of a gateway under a soak: resources of its process, its health, and its log."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import IO, Any

from benchmarks.soak.watch import Sampler, resident_mib, scrape

_HEALTH_EVERY_S = 0.2
_HEALTH_TIMEOUT_S = 10.0
# The log has at most one line a second for each kind of line, and there are about twenty kinds.
MOST_LINES_A_MINUTE = 600
_WRONG = re.compile(r" (ERROR|CRITICAL) |Traceback|^\w*(Error|Warning): |never awaited")


@dataclass(frozen=True)
class GatewaySample:
    """State of a gateway at one moment.

    It has the seconds since the start, the memory of the process in MiB, and counts.
    """

    seconds: float
    gateway_mib: float
    threads: int
    descriptors: int
    tasks: int
    speaking: int
    sockets: int

    def above(self, other: GatewaySample) -> dict[str, int]:
        """Returns the counts that are larger than in another sample, with the difference.

        Threads are not compared, because pools keep theirs.
        """
        names = ("descriptors", "tasks", "speaking", "sockets")
        differences = {name: getattr(self, name) - getattr(other, name) for name in names}
        return {name: count for name, count in differences.items() if count > 0}


class GatewayWatch(Sampler[GatewaySample]):
    """Sampler of a gateway.

    Args:
        process: process of `gateway_command`, which prints the number of its tasks.
        metrics_url: host:port of the metrics of the gateway.
    """

    def __init__(self, process: subprocess.Popen[str], metrics_url: str) -> None:
        super().__init__()
        self._process = process
        self._metrics_url = metrics_url

    def look(self) -> GatewaySample:
        """Returns a sample of the gateway.

        Raises:
            OSError: the gateway is gone.
        """
        process = Path(f"/proc/{self._process.pid}")
        threads, descriptors = (len(list((process / name).iterdir())) for name in ("task", "fd"))
        os.kill(self._process.pid, signal.SIGUSR1)
        answers: IO[str] | None = self._process.stdout
        assert answers is not None
        tasks = int(answers.readline())
        metrics = scrape(self._metrics_url)
        return GatewaySample(
            seconds=self.seconds,
            gateway_mib=resident_mib(self._process.pid),
            threads=threads,
            descriptors=descriptors,
            tasks=tasks,
            speaking=int(metrics["token2wav_gateway_speaking"]),
            sockets=int(metrics["token2wav_gateway_sockets"]),
        )

    def look_when_at_rest(self, rest: GatewaySample, seconds: float) -> GatewaySample:
        """Returns a sample that holds no more than a sample at rest, or the last one in a time."""
        deadline = time.monotonic() + seconds
        while (sample := self.look()).above(rest) and time.monotonic() < deadline:
            time.sleep(0.5)
        return sample


class Health(threading.Thread):
    """Thread that asks a gateway for its health until `stop`.

    Attributes:
        failures: failures with their counts.
    """

    def __init__(self, port: int) -> None:
        super().__init__(name="soak-health", daemon=True)
        self.failures: Counter[str] = Counter()
        self._port = port
        self._over = threading.Event()
        self._milliseconds: list[float] = []

    def run(self) -> None:
        while not self._over.wait(_HEALTH_EVERY_S):
            began = time.monotonic()
            try:
                self._ask()
            except (OSError, http.client.HTTPException) as error:
                self.failures[f"{type(error).__name__} {error}"] += 1
            self._milliseconds.append(1000 * (time.monotonic() - began))

    def stop(self) -> None:
        self._over.set()
        self.join()

    def summary(self) -> dict[str, Any]:
        """Returns the number of requests, and their latency in milliseconds."""
        percentiles = quantiles(self._milliseconds, n=1000, method="inclusive")
        return {
            "requests": len(self._milliseconds),
            "failures": dict(self.failures),
            "median_ms": round(percentiles[499], 1),
            "p99_ms": round(percentiles[989], 1),
            "most_ms": round(max(self._milliseconds), 1),
        }

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_HEALTH_TIMEOUT_S)
        with closing(connection):
            connection.request("GET", "/health/live")
            response = connection.getresponse()
            if response.status != 200 or response.read() != b'{"status":"live"}':
                raise OSError(f"status {response.status}")


def read_log(file: Path, secrets: list[str]) -> tuple[int, list[str]]:
    """Reads the log of a gateway.

    Args:
        secrets: keys and words of texts, which the log must not contain.

    Returns:
        The number of lines in the busiest minute, and problems.
    """
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    problems = [line for line in lines if _WRONG.search(line)][:20]
    problems += [
        f"the log contains {secret!r}"
        for secret in secrets
        if any(secret in line for line in lines)
    ]
    minutes = Counter(line[:16] for line in lines)  # 2027-01-31 23:59
    most = max(minutes.values(), default=0)
    if most > MOST_LINES_A_MINUTE:
        problems.append(f"{most} lines in a minute; at most {MOST_LINES_A_MINUTE} are expected")
    return most, problems
