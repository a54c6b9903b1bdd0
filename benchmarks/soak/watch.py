"""Observation of a soak: readings of processes, state that they still hold, leftovers, and logs."""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from testkit.rigs.metrics import labelled, scrape
from testkit.rigs.observed_gateway import ObservedGateway
from testkit.rigs.processes import entries, resident_mib
from testkit.rigs.traces import Traces
from token2wav_server.launcher.log import is_relevant

# Values at one moment, by name. Memory is in MiB, and its names end with `_mib`.
Reading = dict[str, float]

# in which a server drops everything after its last client, an idle one after 12 s
REST_SECONDS = 75.0
# The allocator of a process with several threads moves by 20 MiB from minute to minute. A leak
# of concern is a chunk of audio (100 kB) an utterance, which would be 60 MiB from third to
# third of ten minutes. Runs shorter than JUDGED_MINUTES are only warm-up, so their growth is
# reported without a verdict.
JUDGED_MINUTES = 5.0
GROWTH_MIB = 32.0
_MOST_ROWS = 120  # of readings in a report

_STREAM_END = re.compile(
    r'^I\d{4} \S+ (?P<engine>\d+) \S+\] "(?:canary )?stream=(?P<stream>\d+) '
    r'reason=(?P<reason>\w+) .*underruns=(?P<underruns>\d+)"$'
)
_RESTART = re.compile("^token2wav: .*; restarting the (engine|server)")
_WRONG = re.compile(
    r"^[WE]\d{4} |Traceback|\b(?:error|signal|terminate|corrupted)\b", re.IGNORECASE
)
# Triton 2.51 never releases a request that its own front end rejected for a shape or a type. The
# model can then not be unloaded in good order, and the server ends when its exit timeout expires.
# A kill has one line of the launcher, and the native front logs the end of its connection.
# The warning about the cache is expected because the cache is small on purpose, so that it fills,
# and the warning about streams without a key because some misdeeds use no key.
_EXPECTED = re.compile(
    "failed to stop server: Internal - Exit timeout expired|the cache has pages for"
    "|a stream without the request parameter stream_key"
    "|^token2wav: .*; restarting the (engine|server)|engine: the connection has ended: "
)
_WRONG_IN_GATEWAY = re.compile(r" (ERROR|CRITICAL) |Traceback|^\w*(Error|Warning): |never awaited")
# The log of a gateway has at most one line a second for each kind of line, and there are about
# twenty kinds.
_MOST_LINES_A_MINUTE = 600
_HEALTH_TIMEOUT_S = 10.0


class Watch(threading.Thread):
    """Thread that takes readings until `stop`.

    Args:
        read: takes a reading.
        excuses: returns whether a reading that began at a monotonic time may have failed by an
            outage.
    """

    def __init__(
        self,
        read: Callable[[], Reading],
        every_s: float = 1.0,
        excuses: Callable[[float], bool] = lambda began: False,
    ) -> None:
        super().__init__(name="soak-watch", daemon=True)
        self.readings: list[Reading] = []
        self._read, self._every_s, self._excuses = read, every_s, excuses
        self._over = threading.Event()
        self._start = time.monotonic()

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            began = time.monotonic()
            try:
                self.readings.append(self.look())
            except (OSError, LookupError, ValueError):  # no process, or not all of its metrics
                if not self._excuses(began):
                    raise

    def stop(self) -> None:
        self._over.set()
        self.join()

    def look(self) -> Reading:
        """Returns a reading with the seconds since the start."""
        return {"seconds": round(time.monotonic() - self._start, 1), **self._read()}

    def most(self) -> Reading:
        """Returns the largest value of each name."""
        return {name: max(row[name] for row in self.readings) for name in self.readings[0]}

    def rows(self) -> list[Reading]:
        """Returns evenly spaced readings for a report."""
        return self.readings[:: -(-len(self.readings) // _MOST_ROWS)]

    def calm(self, since: float) -> list[Reading]:
        """Returns the readings from a monotonic time on."""
        return [row for row in self.readings if row["seconds"] >= since - self._start]

    def growth_mib(self, since: float = 0.0) -> dict[str, float]:
        """Returns the growth of each kind of memory from the middle third to the last third.

        The growth is between medians. The first third is warm-up.

        Args:
            since: monotonic time of the first reading that counts.
        """
        readings = self.calm(since)
        third = len(readings) // 3
        if not third:
            return {}
        middle, last = readings[third : 2 * third], readings[2 * third :]
        return {
            name: round(
                median(reading[name] for reading in last)
                - median(reading[name] for reading in middle),
                2,
            )
            for name in self.readings[0]
            if name.endswith("_mib")
        }


class ServerProbe:
    """Probe of a running server: its processes, its shared memory and its metrics.

    Args:
        metrics_url: host:port.
        traces: returns the traces of the server, which may have been restarted.
    """

    def __init__(self, metrics_url: str, traces: Callable[[], Traces]) -> None:
        self._metrics_url, self._read_traces, self._traces = metrics_url, traces, traces()

    def read(self) -> Reading:
        """Takes a reading. Raises OSError if the server is gone."""
        self._traces = self._read_traces()
        tritonserver = self._traces.processes[1]
        metrics = scrape(self._metrics_url)
        segments = Path("/dev/shm").glob(f"{self._traces.shm_prefix}*")
        return {
            **process_reading("model", self._traces.engine),
            "tritonserver_mib": resident_mib(tritonserver),
            "tritonserver_descriptors": entries(tritonserver, "fd"),
            "shared_memory_mib": round(sum(file.stat().st_size for file in segments) / 2**20, 1),
            "open_streams": max(labelled(metrics, "token2wav_open_streams").values()),
            "cache_pages": metrics['token2wav_cache_pages{state="used"}'],
        }

    def when_empty(self) -> dict[str, float]:
        """Returns the metrics as soon as no stream is open, or after `REST_SECONDS`."""
        deadline = time.monotonic() + REST_SECONDS
        while True:
            metrics = scrape(self._metrics_url)
            is_empty = not any(labelled(metrics, "token2wav_open_streams").values())
            if is_empty or time.monotonic() > deadline:
                return metrics
            time.sleep(0.2)

    def left_behind(self) -> list[str]:
        """Lists what a stopped server has left, after up to `REST_SECONDS`."""
        return [f"left behind: {trace}" for trace in self._traces.remaining_after(REST_SECONDS)]


def still_held(metrics: dict[str, float]) -> list[str]:
    """Lists state that a server still holds without any open client."""
    pages = labelled(metrics, "token2wav_cache_pages")
    problems = [
        f"{count:g} streams are still held by the {holder}"
        for holder, count in labelled(metrics, "token2wav_open_streams").items()
        if count
    ]
    if pages["used"] != pages["shared"]:
        used, shared = pages["used"], pages["shared"]
        problems.append(f"{used:g} pages of the cache are in use, {shared:g} of them by prompts")
    return problems


def gateway_reading(gateway: ObservedGateway) -> Reading:
    """Takes a reading of a running gateway. Raises OSError if the gateway is gone."""
    metrics = scrape(gateway.metrics_url)
    return {
        **process_reading("gateway", gateway.process.pid),
        "tasks": gateway.tasks(),
        "speaking": metrics["token2wav_gateway_speaking"],
        "sockets": metrics["token2wav_gateway_sockets"],
    }


def above_rest(read: Callable[[], Reading], rest: Reading) -> list[str]:
    """Lists the values of a reading that are above those at rest.

    Waits up to `REST_SECONDS` until they have returned.
    """
    deadline = time.monotonic() + REST_SECONDS
    while True:
        reading = read()
        above = {name: reading[name] - value for name, value in rest.items()}
        problems = [f"{more:g} more {name} than before" for name, more in above.items() if more > 0]
        if not problems or time.monotonic() > deadline:
            return problems
        time.sleep(0.5)


class HealthProbe:
    """Probe that asks a gateway for its health.

    Attributes:
        failures: failures with their counts.
    """

    def __init__(self, url: str) -> None:
        self.failures = Counter[str]()
        self._url = url

    def read(self) -> Reading:
        began = time.monotonic()
        try:
            with urllib.request.urlopen(self._url, timeout=_HEALTH_TIMEOUT_S) as response:
                if (content := response.read()) != b'{"status":"live"}':
                    raise OSError(f"{content[:200]!r}")
        except (OSError, http.client.HTTPException) as error:
            self.failures[f"{type(error).__name__} {error}"] += 1
        return {"latency_ms": 1000 * (time.monotonic() - began)}


def read_server_log(lines: list[str], streams: int) -> tuple[dict[str, Any], list[str]]:
    """Reads the log of `token2wav serve`, which may have restarted the server or its engine.

    Args:
        streams: limit of the open streams of one engine.

    Returns:
        The streams of all engines, the ended ones by reason, their underruns, and the restarts.
        Then problems: unexpected lines, and streams that did not end exactly once. Streams that
        were open when their engine was killed, at most `streams` and one canary, have no end.
    """
    ends = [match for line in lines if (match := _STREAM_END.search(line))]
    times = Counter((end["engine"], int(end["stream"])) for end in ends)
    last = dict(sorted(times))
    restarts = Counter(match[1] for line in lines if (match := _RESTART.search(line)))
    problems = [
        line
        for line in lines
        if is_relevant(line) and _WRONG.search(line) and not _EXPECTED.search(line)
    ]
    for engine, number in last.items():
        counts = Counter(times[engine, stream] for stream in range(1, number + 1))
        lost = 0 if ends[-1]["engine"] == engine else streams + 1
        if counts[0] > lost or counts.keys() - {0, 1}:
            problems.append(f"engine {engine}: streams by their number of ends: {dict(counts)}")
    facts = {
        "streams": sum(last.values()),
        "ended": dict(Counter(end["reason"] for end in ends)),
        "underruns": sum(int(end["underruns"]) for end in ends),
        "restarts": dict(restarts),
    }
    return facts, [f"log: {problem}" for problem in problems]


def read_gateway_log(file: Path, secrets: list[str]) -> tuple[int, list[str]]:
    """Reads the log of a gateway.

    Args:
        secrets: keys and words of texts, which the log must not contain.

    Returns:
        The number of lines in the busiest minute, and problems.
    """
    lines = _lines(file)
    problems = [line for line in lines if _WRONG_IN_GATEWAY.search(line)][:20]
    problems += [f"it contains {secret!r}" for secret in secrets if secret in "\n".join(lines)]
    minutes = Counter(line[:16] for line in lines)  # 2027-01-31 23:59
    most = max(minutes.values(), default=0)
    if most > _MOST_LINES_A_MINUTE:
        problems.append(f"{most} lines in a minute; at most {_MOST_LINES_A_MINUTE} are expected")
    return most, [f"log: {problem}" for problem in problems]


def process_reading(name: str, process: int) -> Reading:
    """Returns memory, threads and descriptors of a process."""
    return {
        f"{name}_mib": resident_mib(process),
        f"{name}_threads": entries(process, "task"),
        f"{name}_descriptors": entries(process, "fd"),
    }


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines()
