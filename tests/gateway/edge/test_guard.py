"""Guard of HTTP requests: keys before bodies, slow bodies, and clients that stop reading."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from token2wav_gateway.access import Access
from token2wav_gateway.edge.guard import Guard
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import KeySettings, LimitSettings


class Client:
    """Client of an ASGI application. It sends a body slowly, and may stop reading."""

    def __init__(self, pieces: list[bytes], *, reads: bool = True) -> None:
        self._pieces = pieces
        self._reads = reads
        self.asked = 0
        self.answer: list[Message] = []

    async def receive(self) -> Message:
        self.asked += 1
        if not self._pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": True}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not self._reads:
            await asyncio.Event().wait()
        self.answer.append(message)

    @property
    def status(self) -> int:
        return int(self.answer[0]["status"])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.answer[1]["body"])["error"]
        return error


class Application:
    """ASGI application that reads a body, answers without an end, and says when it is left."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads
        self.left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while self._reads and (await receive())["type"] == "http.request":
                pass
            await StreamingResponse(self._pieces())(scope, receive, send)
        finally:
            self.left = True

    async def _pieces(self) -> Any:
        while True:
            yield b"x"
            await asyncio.sleep(0)


def request(application: Application, client: Client, *, path: str, limits: LimitSettings) -> None:
    key = KeySettings(name="shop", sha256=hashlib.sha256(b"right").hexdigest())
    guard = Guard(application, Access([key]), limits, Metrics())
    scope = {
        "type": "http",
        "path": path,
        "asgi": {"spec_version": "2.3"},
        "headers": [(b"authorization", b"Bearer right")] if path == "/v1/models" else [],
    }
    asyncio.run(guard(scope, client.receive, client.send))


@pytest.mark.parametrize("path", ["/v1/audio/voices", "/proxy/v1/audio/voices", "/health/live/x"])
def test_a_request_without_a_key_is_refused_unread(path: str) -> None:
    client = Client([b"x"] * 100)
    request(Application(reads=True), client, path=path, limits=LimitSettings())
    assert client.status == 401
    assert "a valid key is needed" in client.error["message"]
    assert client.asked == 0


def test_a_body_that_does_not_arrive_is_refused() -> None:
    client = Client([b"x"] * 3)
    limits = LimitSettings(seconds=0.1)
    request(Application(reads=True), client, path="/v1/models", limits=limits)
    assert client.status == 408
    assert client.error["message"] == "body: not complete after 0.1 s"


def test_a_client_that_stops_reading_ends_its_response() -> None:
    application, client = Application(reads=False), Client([], reads=False)
    limits = LimitSettings(idle_s=0.1)
    request(application, client, path="/v1/models", limits=limits)
    assert application.left
    assert client.status == 200
    assert len(client.answer) == 1
