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
from testkit.rigs.raw_grpc import (
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
)
from token2wav.config import LimitConfig

_OPENING = PREFACE + frame(SETTINGS, 0, 0, b"")
_MAX_CONCURRENT_STREAMS = 3


def test_a_connection_carries_the_streams_of_eight_servers(tmp_path: Path) -> None:
    """HAProxy allows a connection eight times the streams of a server. A client has one connection,
    and streams beyond HAProxy's limit would wait without an error.
    """
    with (
        Balancer.start(tmp_path, [], grpc_port=1, status_port=1) as balancer,
        connected(balancer.url) as client,
    ):
        client.sendall(_OPENING)
        settings = read_settings(client)
    assert settings[_MAX_CONCURRENT_STREAMS] >= 8 * LimitConfig().streams


def test_an_address_that_resets_streams_without_end(tmp_path: Path) -> None:
    """Such a flood killed HAProxy 2.6.12. Other addresses must still be served."""
    with Balancer.start(tmp_path, [], grpc_port=1, status_port=1) as balancer:
        with connected(balancer.url, source="127.0.0.2") as attacker:
            attacker.sendall(_OPENING)
            threading.Thread(target=discard, args=(attacker,), daemon=True).start()
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                flood(attacker)
        with connected(balancer.url) as client:
            client.sendall(_OPENING)
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
    # POST, http, :path /x and :authority a, out of HPACK's own table
    headers = b"\x83\x86\x04\x02/x\x01\x01a"
    cancelled = struct.pack("!I", 8)
    return frame(HEADERS, END_STREAM | END_HEADERS, stream, headers) + frame(
        RST_STREAM, 0, stream, cancelled
    )


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
        head = stream.read(HEAD)
        assert head[3] == SETTINGS, "not a frame of settings"
        body = stream.read(int.from_bytes(head[:3], "big"))
    return dict(struct.iter_unpack("!HI", body))
