"""Bounds of the command: attacks neither take all of its file descriptors or memory, nor fill its
log. A port that cannot be opened ends it.
"""

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

import grpc
import httpx
import pytest

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.forked_command import run, start
from testkit.rigs.processes import entries, resident_mib
from testkit.rigs.raw_grpc import END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, header_block
from token2wav_server import Ports

DESCRIPTORS = 128
CALLS = 50
STREAMS = 100_000
FEW = "limits: {streams: 4, sockets: 4}"
HALF_A_HEADER = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (\w+ \S+: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """The command as a process."""

    process: BaseProcess
    ports: Ports
    log: Path

    @classmethod
    @contextmanager
    def start(cls, folder: Path, settings: str = "", descriptors: int = 0) -> Iterator[Command]:
        """Starts the command.

        Args:
            settings: its settings; empty for none, and for a port of Riva's interface.
            descriptors: its limit of file descriptors; 0 for that of this process.
        """
        (folder / "gateway.yaml").write_text(settings)
        ports, log = Ports.free(), folder / "log"
        options = ["--port", str(ports.http)]
        options += ["--config", str(folder / "gateway.yaml")] if settings else []
        options += [] if settings else ["--riva-port", str(ports.grpc)]
        process = start("gateway", *options, out=log, err=log, descriptors=descriptors)
        try:
            yield cls(process, ports, log)
        finally:
            process.kill()
            process.join()

    def stop(self) -> None:
        """Ends the command by a signal, as a service does."""
        self.process.terminate()
        self.process.join(PATIENCE_SECONDS)
        assert self.process.exitcode == 0

    def await_riva(self) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self.ports.grpc}") as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_SECONDS)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}/health/live"

    @property
    def descriptors(self) -> int:
        return entries(self.pid, "fd")

    def answers(self) -> bool:
        with suppress(OSError), urlopen(self.url, timeout=PATIENCE_SECONDS) as answer:
            return bool(answer.status == 200)
        return False

    def connect(self, stack: ExitStack) -> socket.socket:
        address = ("127.0.0.1", self.ports.http)
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
    with Command.start(tmp_path, FEW, DESCRIPTORS) as command, ExitStack() as stack:
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
    with (
        Command.start(tmp_path, FEW, DESCRIPTORS) as command,
        httpx.Client(timeout=PATIENCE_SECONDS) as monitor,
    ):
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
    with Command.start(tmp_path, "limits: {streams: 20}", DESCRIPTORS) as command:
        command.process.join(PATIENCE_SECONDS)
        assert command.process.exitcode == 2
    assert command.log.read_text() == (
        "token2wav gateway: limits: 20 streams and 256 sockets need 396 file descriptors, but the "
        f"gateway may open {DESCRIPTORS} (ulimit -n)\n"
    )


def refused(folder: Path, *options: str) -> str:
    """Runs the command with this folder for temporary files, and returns the last line."""
    ended = run({"TMPDIR": str(folder)}, "gateway", "--port", str(Ports.free().http), *options)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1].removeprefix("token2wav gateway: ")


def test_a_command_that_cannot_start_says_why(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused(tmp_path, "--riva-port", str(port)) == (
            f"riva port {port}: 127.0.0.1:{port} cannot be opened"
        )
        message = refused(tmp_path, "--metrics-port", str(port))
        assert message.startswith(f"metrics port {port}: ")
    assert refused(tmp_path, "--config", "/nowhere.yaml").startswith("/nowhere.yaml: ")


def test_a_long_path_of_temporary_files_ends_the_command(tmp_path: Path) -> None:
    """The folder has a Unix socket, whose path is bounded."""
    port, folder = Ports.free().grpc, tmp_path / ("x" * 100)
    folder.mkdir()
    message = refused(folder, "--riva-port", str(port))
    assert message.startswith(f"riva port {port}: its socket {folder}/")
    assert message.endswith("so that this one has at most 107 bytes")
    assert not list(folder.iterdir())


def test_wrong_calls_do_not_fill_the_log(tmp_path: Path) -> None:
    """The library gRPC writes a line for each compressed message, unless it is silenced."""
    with Command.start(tmp_path) as command:
        command.await_riva()
        channel = grpc.insecure_channel(f"127.0.0.1:{command.ports.grpc}")
        call = channel.unary_unary("/nvidia.riva.tts.RivaSpeechSynthesis/Synthesize")
        for _ in range(CALLS):
            with pytest.raises(grpc.RpcError):
                call(bytes(10_000), compression=grpc.Compression.Gzip)
            with pytest.raises(grpc.RpcError):
                call(b"\xff")
        channel.close()
        command.stop()
    assert len(command.log.read_text().splitlines()) < 20


def test_streams_without_end_on_one_connection_take_no_memory(tmp_path: Path) -> None:
    """Without a limit of streams, this many took 200 MB, and delayed other requests by a second."""
    head = header_block("/nvidia.riva.tts.RivaSpeechSynthesis/Synthesize", {})
    with Command.start(tmp_path) as command:
        command.await_riva()
        before, address = resident_mib(command.pid), ("127.0.0.1", command.ports.grpc)
        with socket.create_connection(address, PATIENCE_SECONDS) as flood:
            flood.setblocking(True)
            flood.sendall(PREFACE + frame(SETTINGS, 0, 0))
            with suppress(ConnectionError):  # the gateway may close the connection
                for first in range(1, 2 * STREAMS, 2000):
                    streams = range(first, first + 2000, 2)
                    flood.sendall(
                        b"".join(frame(HEADERS, END_HEADERS, stream, head) for stream in streams)
                    )
            assert command.answers()
            assert resident_mib(command.pid) < before + 95
        command.stop()
