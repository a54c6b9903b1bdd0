"""WebSockets of a gateway whose servers never answer: clients that stop reading, long messages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fastapi import WebSocket
from safetensors.numpy import save_file
from starlette.types import Message

from tests.gateway.test_voices import TENSORS
from tests.support.patience import PATIENCE_SECONDS
from token2wav_gateway.app import create_app
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings

SCOPE = {"type": "websocket", "path": "/v1/audio/speech/stream", "headers": []}


class Client:
    """Client of a WebSocket, which sends messages and stops reading after the handshake.

    Attributes:
        asked: number of messages that the gateway has asked for.
    """

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.asked = 0
        self._messages: list[Message] = [
            {"type": "websocket.connect"},
            *({"type": "websocket.receive", "text": json.dumps(message)} for message in messages),
        ]

    async def receive(self) -> Message:
        self.asked += 1
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


def test_a_long_message_does_not_hold_up_other_clients(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "anna.safetensors")
    length = 1_000_000

    async def serve() -> int:
        settings = {"voices": {"folder": tmp_path}, "limits": {"idle_s": 0.1}}
        app = create_app(Settings.model_validate(settings), Metrics())
        client = Client({"voice": "anna"}, {"type": "input.text", "text": ". " * (length // 2)})
        turns = 0
        async with app.router.lifespan_context(app):
            socket = WebSocket(SCOPE, client.receive, client.send)
            serving = asyncio.create_task(app.state.sockets.serve(socket))
            while not serving.done():
                await asyncio.sleep(0)
                turns += client.asked == 3  # the gateway works on the long text
        return turns

    assert asyncio.run(serve()) > length // 10_000
