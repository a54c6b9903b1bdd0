"""Riva's port of the command: a port that cannot be opened, floods of streams, and the log."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.forked_command import run, start
from testkit.rigs.processes import resident_mib
from token2wav_server import Ports

CALLS = 50
STREAMS = 100_000


def refused(ports: Ports, folder: Path) -> str:
    """Runs the command with this folder for temporary files, and returns the last line."""
    options = ["--port", str(ports.http), "--riva-port", str(ports.grpc)]
    ended = run({"TMPDIR": str(folder)}, "gateway", *options)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1]


def test_a_port_that_is_taken_ends_the_command(tmp_path: Path) -> None:
    ports = Ports.free()
    with socket.create_server(("127.0.0.1", ports.grpc)):
        assert refused(ports, tmp_path) == (
            f"token2wav gateway: riva port {ports.grpc}: 127.0.0.1:{ports.grpc} cannot be opened"
        )


def test_a_long_path_of_temporary_files_ends_the_command(tmp_path: Path) -> None:
    """The folder has a Unix socket, whose path is bounded."""
    ports, folder = Ports.free(), tmp_path / ("x" * 100)
    folder.mkdir()
    message = refused(ports, folder)
    assert message.startswith(f"token2wav gateway: riva port {ports.grpc}: its socket {folder}/")
    assert message.endswith("so that this one has at most 107 bytes")
    assert not list(folder.iterdir())


@contextmanager
def running(log: Path) -> Iterator[tuple[Ports, int]]:
    """Runs the command, and yields its ports and its process id."""
    ports = Ports.free()
    options = ["--port", str(ports.http), "--riva-port", str(ports.grpc)]
    process = start("gateway", *options, out=log, err=log)
    assert process.pid is not None
    try:
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_SECONDS)
        yield ports, process.pid
    finally:
        process.terminate()
        process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0


def test_wrong_calls_do_not_fill_the_log(tmp_path: Path) -> None:
    """The library gRPC writes a line for each compressed message, unless it is silenced."""
    log = tmp_path / "log"
    with running(log) as (ports, _), grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        call = channel.unary_unary("/nvidia.riva.tts.RivaSpeechSynthesis/Synthesize")
        for _ in range(CALLS):
            with pytest.raises(grpc.RpcError):
                call(bytes(10_000), compression=grpc.Compression.Gzip)
            with pytest.raises(grpc.RpcError):
                call(b"\xff")
    assert len(log.read_text().splitlines()) < 20


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns a frame of HTTP/2."""
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
    return head + payload


def test_streams_without_end_on_one_connection_take_no_memory(tmp_path: Path) -> None:
    """Without a limit of streams, this many took 200 MB, and delayed other requests by a second."""

    def text(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    head = b"\x83\x86" + text(b":path", b"/nvidia.riva.tts.RivaSpeechSynthesis/Synthesize")
    head += text(b":authority", b"x") + text(b"content-type", b"application/grpc")
    head += text(b"te", b"trailers")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    with running(tmp_path / "log") as (ports, process):
        health = f"http://127.0.0.1:{ports.http}/health/live"
        before = resident_mib(process)
        with socket.create_connection(("127.0.0.1", ports.grpc), PATIENCE_SECONDS) as flood:
            flood.setblocking(True)
            flood.sendall(preface)
            with suppress(ConnectionError):  # the gateway may close the connection
                for first in range(1, 2 * STREAMS, 2000):
                    streams = range(first, first + 2000, 2)
                    flood.sendall(b"".join(frame(1, 4, stream, head) for stream in streams))
            assert httpx.get(health, timeout=PATIENCE_SECONDS).status_code == 200
            assert resident_mib(process) < before + 95
