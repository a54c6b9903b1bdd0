"""File descriptors of the command: attacks take not all of them, and their end is no end."""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from urllib.request import urlopen

import httpx

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.forked_command import start
from testkit.rigs.processes import entries
from token2wav_server import Ports

DESCRIPTORS = 128
FEW = "limits: {streams: 4, sockets: 4}"
HALF_A_HEADER = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (\w+ \S+: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """The command as a process with few descriptors."""

    process: BaseProcess
    port: int
    log: Path

    @classmethod
    @contextmanager
    def start(cls, folder: Path, settings: str) -> Iterator[Command]:
        (folder / "gateway.yaml").write_text(settings)
        port, log = Ports.free().http, folder / "log"
        options = ["--port", str(port), "--config", str(folder / "gateway.yaml")]
        process = start("gateway", *options, out=log, err=log, descriptors=DESCRIPTORS)
        try:
            yield cls(process, port, log)
        finally:
            process.kill()
            process.join()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/health/live"

    @property
    def descriptors(self) -> int:
        return entries(self.pid, "fd")

    def answers(self) -> bool:
        with suppress(OSError), urlopen(self.url, timeout=PATIENCE_SECONDS) as answer:
            return bool(answer.status == 200)
        return False

    def connect(self, stack: ExitStack) -> socket.socket:
        address = ("127.0.0.1", self.port)
        return stack.enter_context(socket.create_connection(address, PATIENCE_SECONDS))

    def lines(self) -> dict[str, list[datetime]]:
        """Returns the times of all lines of the log, by their kind."""
        kinds: dict[str, list[datetime]] = {}
        for time, line in _LINE.findall(self.log.read_text()):
            kind = re.sub(r"\d+| \(and.*", "", line)
            kinds.setdefault(kind, []).append(datetime.strptime(time, "%Y-%m-%d %H:%M:%S,%f"))
        return kinds

    def check_log(self) -> None:
        """Checks that the log has one line a second of each kind, and nothing else."""
        for kind, times in self.lines().items():
            gaps = [(after - before).total_seconds() for before, after in pairwise(times)]
            assert all(gap > 0.98 for gap in gaps), (kind, gaps)
        assert _LINE.sub("", self.log.read_text()).strip() == ""


def lines_of(command: Command, words: str) -> list[datetime]:
    return [time for kind, times in command.lines().items() if words in kind for time in times]


def test_idle_connections_leave_a_descriptor_for_a_health_check(tmp_path: Path) -> None:
    with Command.start(tmp_path, FEW) as command, ExitStack() as stack:
        until(command.answers)
        for number in range(2 * DESCRIPTORS):
            connection = command.connect(stack)
            if number % 2:
                connection.sendall(HALF_A_HEADER)
            if number % 16 == 0:
                assert command.answers()
                assert command.descriptors < DESCRIPTORS
        assert any("is the limit" in kind for kind in command.lines())
        command.check_log()


def test_a_gateway_without_a_free_descriptor_recovers(tmp_path: Path) -> None:
    with Command.start(tmp_path, FEW) as command, httpx.Client(timeout=PATIENCE_SECONDS) as monitor:
        until(command.answers)
        assert monitor.get(command.url).status_code == 200
        few = command.descriptors + 2
        resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (few, few))
        with ExitStack() as stack:
            for _ in range(20):
                command.connect(stack)
            # Two of these lines: the first second is over.
            until(lambda: len(lines_of(command, "no file descriptor is left")) >= 2)
            assert monitor.get(command.url).status_code == 200
        until(command.answers)
        command.check_log()


def test_limits_that_need_more_descriptors_are_refused(tmp_path: Path) -> None:
    with Command.start(tmp_path, "limits: {streams: 20}") as command:
        command.process.join(PATIENCE_SECONDS)
        assert command.process.exitcode == 2
    assert command.log.read_text() == (
        "token2wav gateway: limits: 20 streams and 256 sockets need 396 file descriptors, but the "
        f"gateway may open {DESCRIPTORS} (ulimit -n)\n"
    )
