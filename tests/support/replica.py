"""Replicas of `token2wav-serve` with the same ports on different addresses, as in containers."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.patience import PATIENCE_SECONDS
from tests.support.serve_command import WHOLE_BLOCKS
from tests.support.traces import Traces
from token2wav_server.launcher import reaper
from token2wav_server.launcher.ports import Ports


@dataclass
class Replica:
    """A running command.

    Attributes:
        address: address of its ports.
        ports: Triton's three ports.
        status_port: port that tells the balancer whether the replica accepts streams.
        printed: all lines of output so far.
    """

    process: subprocess.Popen[str]
    address: str
    ports: Ports
    status_port: int
    printed: list[str] = field(default_factory=list)
    _lines: queue.Queue[str] = field(default_factory=queue.Queue)

    @classmethod
    @contextmanager
    def start(
        cls, model: Path, address: str, ports: Ports, status_port: int, *arguments: str
    ) -> Iterator[Replica]:
        program = str(Path(sys.executable).with_name("token2wav-serve"))
        numbers = [f"--{name}-port={port}" for name, port in vars(ports).items()]
        command = [
            program,
            f"--model={model}",
            f"--host={address}",
            *numbers,
            f"--status-port={status_port}",
        ]
        command.append(f"--config={WHOLE_BLOCKS}")
        with subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            replica = cls(process, address, ports, status_port)
            threading.Thread(target=replica._read, daemon=True).start()
            try:
                yield replica
            finally:
                process.terminate()
                try:
                    process.wait(PATIENCE_SECONDS)
                finally:
                    process.kill()

    @property
    def url(self) -> str:
        return f"{self.address}:{self.ports.grpc}"

    def wait_for_line(self, pattern: str) -> str:
        """Reads the output until a line matches."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not re.search(
            pattern, line := self._lines.get(timeout=max(deadline - time.monotonic(), 0.0))
        ):
            pass
        return line

    def open_streams(self) -> int:
        """Returns the number of open utterances."""
        url = f"http://{self.address}:{self.ports.metrics}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
            text = response.read().decode()
        [count] = re.findall(r'token2wav_open_streams\{owner="scheduler"\} (\S+)', text)
        return int(float(count))

    def kill(self) -> None:
        """Kills every process at once, as when a machine goes down, and removes its leftovers."""
        [reaper_pid] = _children(self.process.pid)
        [server] = _children(reaper_pid)
        traces = Traces.of(server)
        processes = [self.process.pid, *traces.processes]
        for process in processes:
            os.kill(process, signal.SIGSTOP)  # so that none reacts to a death
        for process in processes:
            os.kill(process, signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(left.startswith("process ") for left in traces.remaining()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        reaper.remove_leftovers(traces.folders[0], traces.shm_prefix)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line.rstrip("\n"))
            self._lines.put(self.printed[-1])


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for children in tasks for child in children.read_text().split()]
