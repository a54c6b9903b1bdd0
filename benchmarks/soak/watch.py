"""Observation of a server under a soak: samples of memory, the log, and leftovers after the end."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from testkit.rigs.processes import descendants, parent, stat_fields
from token2wav_server import TritonServer
from token2wav_server.launcher.log import is_relevant

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_EVERY_S = 1.0
_SHM = Path("/dev/shm")
_LINE = re.compile(r'\] "stream=(\d+) reason=(\w+) .*underruns=(\d+)"$')
_WRONG = re.compile(
    r"^[WE]\d{4} |Traceback|\b(?:error|signal|terminate|corrupted)\b", re.IGNORECASE
)
# Triton 2.51 never releases a request that its own front end rejected for a shape or a type. The
# model can then not be unloaded in good order, and the server ends when its exit timeout expires.
# The warning about the cache is expected because the cache is small on purpose, so that it fills,
# and the warning about streams without a key because some misdeeds use no key.
_EXPECTED = re.compile(
    "failed to stop server: Internal - Exit timeout expired|the cache has pages for"
    "|a stream without the request parameter stream_key"
)
# The allocator of a process with several threads moves by 20 MiB from minute to minute. A leak
# of concern is a chunk of audio (100 kB) an utterance, which would be 60 MiB from third to
# third of ten minutes. Runs shorter than JUDGED_MINUTES are only warm-up, so their growth is
# reported without a verdict.
JUDGED_MINUTES = 5.0
GROWTH_MIB = 32.0


@dataclass(frozen=True)
class Sample:
    """State of a server at one moment.

    It has the seconds since the start, counts, and MiB of memory of the processes and of /dev/shm.
    """

    seconds: float
    model_mib: float
    tritonserver_mib: float
    shared_memory_mib: float
    model_threads: int
    model_files: int
    open_streams: int
    cache_pages: int


SampleT = TypeVar("SampleT")


class Sampler(threading.Thread, ABC, Generic[SampleT]):
    """Thread that samples a process every second until `stop`.

    Attributes:
        samples: all samples so far.
    """

    def __init__(self) -> None:
        super().__init__(name="soak-watch", daemon=True)
        self.samples: list[SampleT] = []
        self._over = threading.Event()
        self._start = time.monotonic()

    def run(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.samples.append(self.look())

    def stop(self) -> None:
        self._over.set()
        self.join()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self._start, 1)

    @abstractmethod
    def look(self) -> SampleT:
        """Returns a sample."""


class Watch(Sampler[Sample]):
    """Sampler of a server."""

    def __init__(self, server: TritonServer) -> None:
        super().__init__()
        self._server = server
        self._tritonserver = server.pid
        self._model = _model_process(server.pid)
        command = Path(f"/proc/{server.pid}/cmdline").read_text().replace("\0", "\n")
        self._shm_prefix = _only(r"shm-region-prefix-name=(.+)", command)
        self._folder = Path(_only(r"--backend-directory=(.+)/backends", command))
        reaper = parent(server.pid)
        self._processes = {process: _started(process) for process in (reaper, *descendants(reaper))}

    def look(self) -> Sample:
        """Returns a sample of the server.

        Raises:
            OSError: the server is gone.
        """
        metrics = scrape(self._server.metrics_url)
        stub = Path(f"/proc/{self._model}")
        return Sample(
            seconds=self.seconds,
            model_mib=resident_mib(self._model),
            tritonserver_mib=resident_mib(self._tritonserver),
            shared_memory_mib=round(
                sum(path.stat().st_size for path in self._segments()) / 2**20, 1
            ),
            model_threads=len(list((stub / "task").iterdir())),
            model_files=len(list((stub / "fd").iterdir())),
            open_streams=int(
                max(metrics[key] for key in metrics if key.startswith("token2wav_open_streams{"))
            ),
            cache_pages=int(metrics['token2wav_cache_pages{state="used"}']),
        )

    def left_behind(self) -> list[str]:
        """Lists leftovers of a stopped server: processes, segments of shared memory, folders."""
        alive = [
            f"process {process}"
            for process, start in self._processes.items()
            if _started(process) == start
        ]
        folders = [self._folder] if self._folder.exists() else []
        return alive + [str(path) for path in [*self._segments(), *folders]]

    def _segments(self) -> list[Path]:
        return list(_SHM.glob(f"{self._shm_prefix}*"))


def when_empty(metrics_url: str, seconds: float) -> dict[str, float]:
    """Returns the metrics as soon as no stream is open, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while any(labelled(metrics := scrape(metrics_url), "token2wav_open_streams").values()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return metrics


def still_held(metrics: dict[str, float]) -> list[str]:
    """Lists state that a server still holds without any open client."""
    streams, pages = (
        labelled(metrics, "token2wav_open_streams"),
        labelled(metrics, "token2wav_cache_pages"),
    )
    problems = [
        f"{count:g} streams are still held by the {holder}"
        for holder, count in streams.items()
        if count
    ]
    if pages["used"] != pages["shared"]:
        problems.append(
            f"{pages['used']:g} pages of the cache are in use, {pages['shared']:g} of them by "
            f"prompts"
        )
    return problems


def gone_after(watch: Watch, seconds: float) -> list[str]:
    """Lists the leftovers of a stopped server that remain after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := watch.left_behind()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def labelled(metrics: dict[str, float], family: str) -> dict[str, float]:
    """Returns the values of a metric family with one label, by the value of the label."""
    pairs = (
        (re.fullmatch(rf'{family}\{{\w+="(.*)"\}}', name), value) for name, value in metrics.items()
    )
    return {match[1]: value for match, value in pairs if match}


def growth_mib(samples: Sequence[DataclassInstance]) -> dict[str, float]:
    """Returns the growth of each kind of memory from the middle third to the last third.

    The growth is between medians. The first third is warm-up.
    """
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    return {
        name: round(
            median(getattr(sample, name) for sample in last)
            - median(getattr(sample, name) for sample in middle),
            2,
        )
        for name in asdict(samples[0])
        if name.endswith("_mib")
    }


@dataclass(frozen=True)
class Log:
    """Facts that a soak reads from the log of a server.

    Attributes:
        ended: ended streams for each reason.
        underruns: underruns of all streams.
        streams: number of the last stream.
        wrong: unexpected lines, and streams that did not end exactly once.
    """

    ended: dict[str, int]
    underruns: int
    streams: int
    wrong: list[str]

    @classmethod
    def read(cls, file: Path) -> Log:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        ends = [match for line in lines if (match := _LINE.search(line))]
        wrong = [
            line
            for line in lines
            if is_relevant(line) and _WRONG.search(line) and not _EXPECTED.search(line)
        ]
        times = Counter(int(end[1]) for end in ends)
        streams = max(times, default=0)
        odd = [number for number in range(1, streams + 1) if times[number] != 1]
        wrong += [f"stream {number} has {times[number]} lines at its end" for number in odd]
        return cls(
            dict(Counter(end[2] for end in ends)), sum(int(end[3]) for end in ends), streams, wrong
        )


def scrape(url: str) -> dict[str, float]:
    """Returns every value of a metrics port, by name and labels in their original text."""
    with urllib.request.urlopen(f"http://{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def _model_process(tritonserver: int) -> int:
    stubs = [
        process
        for process in descendants(tritonserver)
        if Path(f"/proc/{process}/comm").read_text().startswith("triton_python")
    ]
    [stub] = stubs
    return stub


def resident_mib(process: int) -> float:
    """Returns the resident memory of a process in MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    return round(int(_only(r"VmRSS:\s+(\d+) kB", status)) / 1024, 1)


def _started(process: int) -> str | None:
    """Returns the start time of a process in clock ticks, or None if the process is over.

    The start time distinguishes the process from a later one with the same id.
    """
    try:
        state, *fields = stat_fields(process)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else fields[18]


def _only(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if not match:
        raise ValueError(f"{pattern} is not in {text}")
    return match[1]


def as_rows(samples: Sequence[DataclassInstance], most: int) -> list[dict[str, Any]]:
    """Returns evenly spaced samples for a report."""
    step = -(-len(samples) // most)
    return [asdict(sample) for sample in samples[::step]]
