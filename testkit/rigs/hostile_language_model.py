"""Attacks of a language model server on the gateway, as a text asks for them."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator

from fastapi.responses import JSONResponse, Response, StreamingResponse

from testkit.patience import PATIENCE_SECONDS

_EVENTS = "text/event-stream"
CUT_OFF = "Cut off here."  # text with an answer of the most tokens


def event(text: str, reason: str | None = None) -> str:
    choice = {"delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


async def endless_line() -> AsyncIterator[str]:
    yield "data: "
    while True:
        yield "x" * 65_536
        await asyncio.sleep(0)


async def endless_event() -> AsyncIterator[str]:
    while True:  # the empty line that ends an event never comes
        yield "data: x\n" * 10_000
        await asyncio.sleep(0)


async def endless_text() -> AsyncIterator[str]:
    while True:
        yield event("no token " * 100)
        await asyncio.sleep(0)


async def endless_tokens() -> AsyncIterator[str]:
    while True:
        yield event("<|s_1|>")
        await asyncio.sleep(0)


async def hang() -> AsyncIterator[str]:
    yield event("<|s_1|>")
    await asyncio.sleep(3600)


def attack(text: str, heard: threading.Event) -> Response | None:
    """Returns the answer to a text that asks for an attack; None for another text.

    Args:
        heard: event before which the answer to "breaks off" does not break off.
    """

    async def breaks_off() -> AsyncIterator[str]:
        yield event("<|s_1|>" * 120)
        assert await asyncio.to_thread(heard.wait, PATIENCE_SECONDS)
        raise ConnectionError("gone")

    streams = {
        "endless line": endless_line,
        "endless event": endless_event,
        "endless text": endless_text,
        "endless tokens": endless_tokens,
        "hang": hang,
        "breaks off": breaks_off,
    }
    answers = {
        "no tokens": event("hello"),
        "wrong token": event("<|s_999999|>") + "data: [DONE]\n\n",
        "no json": "data: {\n\n",
        "a list": "data: [1]\n\n",
        "an error": 'data: {"error": {"message": "out of memory"}}\n\n',
        "half a character": 'data: {"error": "half \\ud83d"}\n\n',
        "no content": "",
        "nulls": 'data: {"choices": [{"delta": null}]}\n\n',
        "brackets": f"data: {'[' * 100_000}\n\n",
        "no end": event("<|s_1|>" * 3),
    }
    if text in streams:
        return StreamingResponse(streams[text](), media_type=_EVENTS)
    if text in answers:
        return Response(answers[text], media_type=_EVENTS)
    if text == "a page":
        return Response("<html>" * 1000, media_type="text/html")
    if text == "a bomb":
        bomb = gzip.compress(f"data: {'x' * 30_000_000}".encode())
        return Response(bomb, headers={"content-encoding": "gzip", "content-type": _EVENTS})
    if text == "status 500":
        return JSONResponse({"error": "x" * 10_000}, 500)
    if text == "a redirect":
        return Response(status_code=307, headers={"location": "http://127.0.0.1:9/"})
    return None
