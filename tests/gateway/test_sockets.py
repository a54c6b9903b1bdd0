"""WebSockets of a gateway whose servers never answer: clients that stop reading."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import WebSocket
from starlette.types import Message

from tests.support.patience import PATIENCE_SECONDS
from token2wav_gateway.app import create_app
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings

SCOPE = {"type": "websocket", "path": "/v1/audio/speech/stream", "headers": []}


class Client:
    """Client of a WebSocket, which sends messages and may stop reading after the handshake."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages: list[Message] = [
            {"type": "websocket.connect"},
            *({"type": "websocket.receive", "text": json.dumps(message)} for message in messages),
        ]

    async def receive(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def send(self, message: Message) -> None:
        if message["type"] != "websocket.accept":
            await asyncio.Event().wait()


def test_a_client_that_stops_reading_is_left() -> None:
    async def serve() -> None:
        app = create_app(Settings.model_validate({"limits": {"idle_s": 0.1}}), Metrics())
        client = Client({"voice": "anna"}, {"type": "input.text", "text": "It rains. It"})
        async with app.router.lifespan_context(app):
            socket = WebSocket(SCOPE, client.receive, client.send)
            await asyncio.wait_for(app.state.sockets.serve(socket), PATIENCE_SECONDS)

    asyncio.run(serve())
