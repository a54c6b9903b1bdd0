"""Language model server of a test: it says tokens at a pace, attacks, and notes its requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse

from testkit.rigs import gateway_rig
from testkit.rigs.hostile_language_model import CUT_OFF, attack, event
from token2wav_client import TokenError


@dataclass
class LanguageModel:
    """Language model server. It attacks if a text of `hostile_language_model.attack` asks for it.

    Attributes:
        tokens_of: tokens of a text; raises TokenError for a text that gets status 400.
        pace: tokens per second.
        holds_after: number of tokens after which an answer waits for `goes_on`; 0 for never.
        bodies: bodies of the requests.
        traces: headers `traceparent` of the requests.
        cancelled: number of cancelled requests.
        goes_on: lets waiting answers continue.
    """

    tokens_of: Callable[[str], Sequence[int]] = gateway_rig.tokens_of
    pace: float = 500.0
    holds_after: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    cancelled: int = 0
    goes_on: threading.Event = field(default_factory=threading.Event)

    def app(self) -> FastAPI:
        """Creates the ASGI application."""
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            self.traces.append(request.headers.get("traceparent", ""))
            text = next(part["content"] for part in body["messages"] if part["role"] == "user")
            if (answer := attack(text, self.goes_on)) is not None:
                return answer
            try:
                tokens = self.tokens_of(text)
            except TokenError as error:
                raise HTTPException(400, str(error)) from None
            end = event("", "length" if text == CUT_OFF else "stop")
            return StreamingResponse(self._pieces(tokens, end), media_type="text/event-stream")

        return app

    async def _pieces(self, tokens: Sequence[int], end: str) -> AsyncIterator[str]:
        start = time.monotonic()
        try:
            for index, token in enumerate(tokens):
                await asyncio.sleep(start + index / self.pace - time.monotonic())
                while index and index == self.holds_after and not self.goes_on.is_set():
                    await asyncio.sleep(0.01)
                yield event(f"<|s_{token}|>")
            yield f"{end}data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
