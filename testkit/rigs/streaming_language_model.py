"""Language model server of a test that takes text while it answers: many tokens for each word."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from starlette.types import Receive, Scope, Send

from testkit.models.tiny_model import demo_tokens
from testkit.rigs.hostile_language_model import event

TOKENS_OF_A_WORD = 20  # the server of the tests begins to speak after a block of 25 tokens
TEMPLATE = """
messages: [{role: user, content: "{text}"}]
token: "<|s_{number}|>"
text: stream
"""


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application, which Starlette's responses cannot be: they read the whole request."""
    if scope["type"] != "http":
        return
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    text, said = "", 0
    async for line in _lines(receive):
        request = json.loads(line)
        text += request["text"] if "text" in request else request["messages"][0]["content"]
        tokens = demo_tokens(TOKENS_OF_A_WORD * len(text.split()))[said:]
        said += len(tokens)
        await _send_body(send, "".join(event(f"<|s_{token}|>") for token in tokens))
    await _send_body(send, f"{event('', 'stop')}data: [DONE]\n\n", more=False)


async def _lines(receive: Receive) -> AsyncIterator[bytes]:
    rest = b""
    while True:
        message = await receive()
        *lines, rest = (rest + message.get("body", b"")).split(b"\n")
        for line in lines:
            yield line
        if not message.get("more_body"):
            return


async def _send_body(send: Send, content: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": content.encode(), "more_body": more})
