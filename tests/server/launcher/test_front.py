"""Request slots of the front: waiting utterances leave some slots to other requests."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from testkit.patience import PATIENCE_SECONDS
from token2wav_server.launcher.access import Access
from token2wav_server.launcher.front import _UTTERANCES, Front
from token2wav_server.launcher.http_ports import CONNECTIONS
from token2wav_server.launcher.ports import LOOPBACK, Ports

SPEAK = (
    b"POST /v2/models/token2wav/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
)


def test_utterances_leave_places_for_health() -> None:
    ports = Ports.free()
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=2 * CONNECTIONS))
        silent.settimeout(PATIENCE_SECONDS)
        inner = Ports(http=silent.getsockname()[1])
        stack.enter_context(Front(LOOPBACK, ports, inner, Access(http_inference=True)))

        def asked(request: bytes) -> socket.socket:
            connection = stack.enter_context(
                socket.create_connection((LOOPBACK, ports.http), PATIENCE_SECONDS)
            )
            connection.sendall(request)
            return connection

        for _ in range(_UTTERANCES):
            asked(SPEAK)
            stack.enter_context(silent.accept()[0])
        for _ in range(CONNECTIONS):
            assert b" 503 " in asked(SPEAK).recv(1000)
        asked(b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n")
        relayed = stack.enter_context(silent.accept()[0])
        assert relayed.recv(1000).startswith(b"GET /v2/health/ready ")
