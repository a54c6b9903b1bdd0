"""Riva's port of the command: a port that is taken, and a log without the errors of clients."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from tests.support.patience import PATIENCE_SECONDS
from token2wav_server import Ports

COMMAND = [sys.executable, "-m", "token2wav", "gateway"]
CALLS = 50


def test_a_port_that_is_taken_ends_the_command() -> None:
    ports = Ports.free()
    with socket.create_server(("127.0.0.1", ports.grpc)):
        command = [*COMMAND, "--port", str(ports.http), "--riva-port", str(ports.grpc)]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        f"token2wav gateway: riva port {ports.grpc}: 127.0.0.1:{ports.grpc} cannot be opened"
    )


def test_wrong_calls_do_not_fill_the_log(tmp_path: Path) -> None:
    """The library gRPC writes a line for each compressed message, unless it is silenced."""
    ports, log = Ports.free(), tmp_path / "log"
    command = [*COMMAND, "--port", str(ports.http), "--riva-port", str(ports.grpc)]
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
                grpc.channel_ready_future(channel).result(PATIENCE_SECONDS)
                call = channel.unary_unary("/nvidia.riva.tts.RivaSpeechSynthesis/Synthesize")
                for _ in range(CALLS):
                    with pytest.raises(grpc.RpcError):
                        call(bytes(10_000), compression=grpc.Compression.Gzip)
                    with pytest.raises(grpc.RpcError):
                        call(b"\xff")
        finally:
            process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    assert len(log.read_text().splitlines()) < 20
