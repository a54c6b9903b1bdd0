"""HTTP/2 settings that HAProxy sends when a client connects. They need no server."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.balancer import Balancer
from token2wav.config import LimitConfig

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_NO_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # length 0, type 4: SETTINGS, no flags, stream 0
_MAX_CONCURRENT_STREAMS = 3


def test_a_connection_carries_the_streams_of_eight_servers(tmp_path: Path) -> None:
    """HAProxy allows a connection eight times the streams of a server. A client has one connection,
    and streams beyond HAProxy's limit would wait without an error.
    """
    with (
        Balancer.start(tmp_path, [], grpc_port=1, status_port=1) as balancer,
        connected(balancer.url) as client,
    ):
        client.sendall(_PREFACE + _NO_SETTINGS)
        settings = read_settings(client)
    assert settings[_MAX_CONCURRENT_STREAMS] >= 8 * LimitConfig().streams


def test_an_address_that_resets_streams_without_end(tmp_path: Path) -> None:
    """Such a flood killed HAProxy 2.6.12. Other addresses must still be served."""
    with Balancer.start(tmp_path, [], grpc_port=1, status_port=1) as balancer:
        with connected(balancer.url, source="127.0.0.2") as attacker:
            attacker.sendall(_PREFACE + _NO_SETTINGS)
            threading.Thread(target=discard, args=(attacker,), daemon=True).start()
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                flood(attacker)
        with connected(balancer.url) as client:
            client.sendall(_PREFACE + _NO_SETTINGS)
            assert read_settings(client)


def flood(connection: socket.socket) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    for first in range(1, 1 << 30, 2000):
        if time.monotonic() > deadline:
            return
        connection.sendall(
            b"".join(opened_and_reset(stream) for stream in range(first, first + 2000, 2))
        )


def opened_and_reset(stream: int) -> bytes:
    number = struct.pack("!I", stream)
    # POST, http, :path /x and :authority a, out of HPACK's own table
    headers = b"\x83\x86\x04\x02/x\x01\x01a"
    end_of_stream_and_headers, cancelled = 5, struct.pack("!I", 8)
    return (
        bytes([0, 0, len(headers), 1, end_of_stream_and_headers]) + number + headers
        + bytes([0, 0, 4, 3, 0]) + number + cancelled
    )  # fmt: skip


def discard(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass


def connected(url: str, source: str = "127.0.0.1") -> socket.socket:
    """Connects as soon as the balancer listens."""
    host, _, port = url.partition(":")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection(
                (host, int(port)), timeout=PATIENCE_SECONDS, source_address=(source, 0)
            )
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def read_settings(client: socket.socket) -> dict[int, int]:
    """Returns the values of the server's first SETTINGS frame, by their numbers."""
    with client.makefile("rb") as stream:
        head = stream.read(len(_NO_SETTINGS))
        assert head[3] == _NO_SETTINGS[3], "not a frame of settings"
        body = stream.read(int.from_bytes(head[:3], "big"))
    return dict(struct.iter_unpack("!HI", body))
