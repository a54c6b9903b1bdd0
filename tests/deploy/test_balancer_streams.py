"""What HAProxy tells a client's connection at its start; no server is needed for that."""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

from tests.deploy.balancer import Balancer
from tests.support.patience import PATIENCE_SECONDS
from token2wav.config import LimitConfig

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_NO_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # length 0, type 4: SETTINGS, no flags, stream 0
_MAX_CONCURRENT_STREAMS = 3


def test_a_connection_carries_more_streams_than_any_server_allows(tmp_path: Path) -> None:
    """A client has one connection, and its streams beyond what HAProxy allows would wait without a word."""
    with (
        Balancer.start(tmp_path, [], grpc_port=1, status_port=1) as balancer,
        connected(balancer.url) as client,
    ):
        client.sendall(_PREFACE + _NO_SETTINGS)
        settings = read_settings(client)
    assert settings[_MAX_CONCURRENT_STREAMS] >= 8 * LimitConfig().streams


def connected(url: str) -> socket.socket:
    """Connects as soon as it listens."""
    host, _, port = url.partition(":")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def read_settings(client: socket.socket) -> dict[int, int]:
    """Values by number of the first frame that a server sends."""
    with client.makefile("rb") as stream:
        head = stream.read(len(_NO_SETTINGS))
        assert head[3] == _NO_SETTINGS[3], "not a frame of settings"
        body = stream.read(int.from_bytes(head[:3], "big"))
    return dict(struct.iter_unpack("!HI", body))
