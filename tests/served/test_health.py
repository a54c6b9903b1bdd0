"""Health checks of servers without a free stream or without a model, and of an absent server."""

from __future__ import annotations

import re

import pytest

from tests.support.golden import GoldenSet
from tests.support.patience import PATIENCE_SECONDS
from tests.support.serve_command import health
from tests.support.server_rig import Rig
from token2wav_client import Client, ServerUnavailable
from token2wav_server.launcher.ports import Ports


def test_health_of_a_server_that_is_full(limited: Rig, golden: GoldenSet) -> None:
    with Client(limited.server.grpc_url) as client, limited.connect() as connection:
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None
        for sequence in ("first", "second"):
            connection.send([1], golden.voice, sequence, start=True)
        assert not connection.answers(requests=2).errors
        # before the two are idle for too long
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is None
        for sequence in ("first", "second"):
            connection.send([], None, sequence, end=True)
        connection.answers(requests=2)


def test_health_of_a_dead_port() -> None:
    completed = health(f"127.0.0.1:{Ports.free().grpc}")
    assert completed.returncode == ServerUnavailable.exit_code
    assert "no server at 127.0.0.1:" in completed.stderr


def test_health_of_a_model_that_is_not_there(rig: Rig) -> None:
    assert health(rig.server.grpc_url, "--model=nobody").returncode == 6


@pytest.mark.parametrize("port", ["http", "metrics", "Triton's own HTTP"])
def test_a_port_of_http_is_named_with_the_port_of_grpc(rig: Rig, port: str) -> None:
    server = rig.server
    urls = {
        "http": server.http_url,
        "metrics": server.metrics_url,
        "Triton's own HTTP": f"127.0.0.1:{server._inner.http}",
    }
    completed = health(urls[port])
    assert completed.returncode == ServerUnavailable.exit_code
    # Triton's own hangs up without an answer; the answer of the others may be lost when they hang
    # up after it.
    message = "(responds with HTTP, not gRPC|closed the connection: it may require TLS .*)"
    assert re.search(
        f"the server at {urls[port]} {message}; by default, Triton's gRPC port is 8001",
        completed.stderr,
    )
