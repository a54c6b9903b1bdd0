"""Status port: the answers to load balancers."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from testkit.patience import PATIENCE_SECONDS
from token2wav_server.launcher.http_ports import Status, StatusPort
from token2wav_server.launcher.ports import Ports


def asked(port: int) -> tuple[int, bytes]:
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
        assert asked(port) == (503, b"starting\n")
        for state, answer in (
            (Status.READY, (200, b"ready\n")),
            (Status.DRAINING, (404, b"draining\n")),
            (Status.STARTING, (503, b"starting\n")),
        ):
            status.set_status(state)
            assert asked(port) == answer
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
