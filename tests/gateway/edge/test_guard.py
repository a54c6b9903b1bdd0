"""Guard of HTTP requests: keys before bodies, slow bodies, and clients that stop reading."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import key_settings, serving, serving_gateway
from testkit.rigs.raw_client import opened, until_closed
from token2wav_gateway.access import Access
from token2wav_gateway.edge.guard import Guard
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import LimitSettings, Settings

SETTINGS = {"keys": [key_settings("shop", "right")], "limits": {"seconds": 0.5}}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving_gateway(Settings.model_validate(SETTINGS)) as port:
        yield port


def refusal(port: int, path: str, key: str = "") -> tuple[int, str]:
    """Sends a request whose body never ends; returns the status and the sentence of its answer."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Length: 100"]
    lines += ["Content-Type: application/json", f"Authorization: Bearer {key}", "", "{"]
    with opened(port) as connection:
        connection.sendall("\r\n".join(lines).encode())
        head, _, body = until_closed(connection).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/audio/voices", "/proxy/v1/audio/voices", "/health/live/x"])
def test_a_request_without_a_key_is_refused_unread(port: int, path: str) -> None:
    assert refusal(port, path) == (401, "authorization: a valid key is needed, as 'Bearer KEY'")


def test_a_body_that_does_not_arrive_is_refused(port: int) -> None:
    late = refusal(port, "/v1/audio/speech", "right")
    assert late == (408, "body: not complete after 0.5 s")


def test_a_client_that_stops_reading_ends_its_response() -> None:
    left = threading.Event()

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 16)
            await asyncio.sleep(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                await StreamingResponse(pieces())(scope, receive, send)
            finally:
                left.set()

    guard = Guard(app, Access([]), LimitSettings(idle_s=0.1), Metrics())
    with serving(guard) as port, opened(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert left.wait(PATIENCE_SECONDS)
        content = until_closed(connection)
    assert content.startswith(b"HTTP/1.1 200 ")
    assert not content.endswith(b"0\r\n\r\n")
