"""Language model server of the soak of the gateway. It says a line, or attacks, as a text asks."""

from __future__ import annotations

import json
import threading

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.soak.lines import Line
from examples.speech import language_model
from testkit.rigs import hostile_language_model
from token2wav_client import TokenError

# Tokens per second, by the mark at the end of a text.
PACES = {".": 60.0, "!": 400.0, "?": 10_000.0}


def text_of(line: Line, mark: str) -> str:
    """Returns the text of a sentence for which the server says a line.

    Args:
        mark: one of `PACES`.
    """
    return f"{line.name}{mark}"


def create_app(lines: list[Line]) -> ASGIApp:
    """Creates the ASGI application.

    A text that is not the text of a line gets the answer of the hostile server.
    """
    tokens = {line.name: line.tokens.tolist() for line in lines}

    def tokens_of(text: str) -> list[int]:
        name = text[:-1]
        if name not in tokens:
            raise TokenError(f"text: {name!r} is not the text of a line")
        return tokens[name]

    honest = {mark: language_model.create_app(tokens_of, pace) for mark, pace in PACES.items()}
    at_once = threading.Event()
    at_once.set()
    enemy = hostile_language_model.create_app(tokens_of, at_once)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await honest["."](scope, receive, send)
            return
        body = await Request(scope, receive).body()
        text = json.loads(body)["messages"][-1]["content"]
        messages: list[Message] = [{"type": "http.request", "body": body}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        await honest.get(text[-1:], enemy)(scope, again, send)

    return app
