"""Front and status port of the launcher: waiting utterances leave some slots to other requests,
metrics need Triton, and load balancers get the latest status.
"""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from testkit.patience import PATIENCE_SECONDS
from token2wav_server.launcher import front
from token2wav_server.launcher.access import Access
from token2wav_server.launcher.http_ports import CONNECTIONS, Status, StatusPort
from token2wav_server.launcher.metrics_folder import MetricsFolder
from token2wav_server.launcher.ports import LOOPBACK, Ports

SPEAK = (
    b"POST /v2/models/token2wav/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
)


def test_utterances_leave_places_for_health(tmp_path: Path) -> None:
    ports = Ports.free()
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=2 * CONNECTIONS))
        silent.settimeout(PATIENCE_SECONDS)
        inner = Ports(http=silent.getsockname()[1])
        access = Access(http_inference=True)
        stack.enter_context(front.Front(LOOPBACK, ports, inner, access, MetricsFolder(tmp_path)))

        def asked(request: bytes) -> socket.socket:
            connection = stack.enter_context(
                socket.create_connection((LOOPBACK, ports.http), PATIENCE_SECONDS)
            )
            connection.sendall(request)
            return connection

        for _ in range(front._UTTERANCES):
            asked(SPEAK)
            stack.enter_context(silent.accept()[0])
        for _ in range(CONNECTIONS):
            assert b" 503 " in asked(SPEAK).recv(1000)
        asked(b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n")
        relayed = stack.enter_context(silent.accept()[0])
        assert relayed.recv(1000).startswith(b"GET /v2/health/ready ")


def test_the_check_of_a_large_body_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, other_answered = threading.Event(), threading.Event()

    def check(_: bytes) -> str:
        begun.set()
        assert other_answered.wait(PATIENCE_SECONDS)
        return "too late"

    monkeypatch.setattr(front, "problem_of", check)
    ports = Ports.free()
    with (
        front.Front(LOOPBACK, ports, ports, Access(http_inference=True), MetricsFolder(tmp_path)),
        socket.create_connection((LOOPBACK, ports.http), PATIENCE_SECONDS) as speaker,
        socket.create_connection((LOOPBACK, ports.http), PATIENCE_SECONDS) as other,
    ):
        speaker.sendall(SPEAK)
        assert begun.wait(PATIENCE_SECONDS)
        other.sendall(b"GET /v2/nothing HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 403 " in other.recv(1000)
        other_answered.set()
        assert b" 400 " in speaker.recv(1000)


def test_metrics_are_unavailable_while_triton_does_not_answer(tmp_path: Path) -> None:
    """Metrics of the models alone would make a server that is starting look alive."""
    ports = Ports.free()
    with (
        front.Front(LOOPBACK, ports, Ports.free(), Access(), MetricsFolder(tmp_path)),
        socket.create_connection((LOOPBACK, ports.metrics), PATIENCE_SECONDS) as connection,
    ):
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 503 " in connection.recv(1000)


def status_of(port: int) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/", timeout=PATIENCE_SECONDS
        ) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_status_port_answers_with_the_latest_status() -> None:
    port = Ports.free().http
    with StatusPort("127.0.0.1", port) as status:
        assert status_of(port) == (503, b"starting\n")
        for state, answer in (
            (Status.READY, (200, b"ready\n")),
            (Status.DRAINING, (404, b"draining\n")),
            (Status.STARTING, (503, b"starting\n")),
        ):
            status.set_status(state)
            assert status_of(port) == answer
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
