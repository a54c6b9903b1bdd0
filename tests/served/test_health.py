"""Health check of another model and at a wrong port, and checks of the machine and of an idle
connection beside a server that runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import TINY, GoldenSet
from testkit.rigs.serve_command import health
from testkit.rigs.server_rig import Rig
from token2wav.commands import main
from token2wav.execution import device
from token2wav_client import Client, ClientVoice, ServerUnavailable


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


def test_the_doctor_beside_a_running_server(
    rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: 1 << 20)  # the server holds the rest
    options = [f"--{name}-port={port}" for name, port in vars(rig.server.ports).items()]
    assert main(["doctor", str(TINY), *options]) == 0
    shown = capsys.readouterr().out
    http = rig.server.ports.http
    assert f"a server already runs here, with HTTP on port {http} of 127.0.0.1; " in shown
    assert "MiB are free on cpu; stop other programs" in shown
    assert "the server that runs here holds a part of it" in shown


def test_pings_between_tokens_do_not_cost_the_connection(
    rig: Rig, golden: GoldenSet, voice: ClientVoice
) -> None:
    """By its default, Triton hangs up at the third ping within 5 minutes."""

    def slow_tokens() -> Iterator[NDArray[np.int32]]:
        yield golden.tokens[:10]
        time.sleep(10)  # five pings
        yield golden.tokens[10:20]

    with Client(rig.server.grpc_url, keepalive_s=2) as client:
        chunks = [chunk.audio for chunk in client.synthesize(slow_tokens(), voice)]
    assert sum(map(len, chunks)) == 20 * 960
