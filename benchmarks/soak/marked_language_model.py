"""Language model server that speaks known texts at paces that their marks select, or attacks."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from testkit.rigs.language_model import LanguageModel
from token2wav_client import TokenError
from token2wav_server.demo import language_model


def create_app(tokens: dict[str, list[int]], paces: dict[str, float]) -> ASGIApp:
    """Creates the ASGI application. A text without a mark gets the answer of an attack.

    Args:
        tokens: tokens of each text without its mark.
        paces: tokens per second by the mark at the end of a text, such as `!`.
    """

    def tokens_of(text: str) -> list[int]:
        name = text[:-1]
        if name not in tokens:
            raise TokenError(f"text: {name!r} is unknown")
        return tokens[name]

    honest = {mark: language_model.create_app(tokens_of, pace) for mark, pace in paces.items()}
    enemy = LanguageModel(tokens_of)
    enemy.goes_on.set()
    attacks = enemy.app()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await next(iter(honest.values()))(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        text = json.loads(body)["messages"][-1]["content"]
        messages: list[Message] = [{"type": "http.request", "body": body}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        await honest.get(text[-1:], attacks)(scope, again, send)

    return app
