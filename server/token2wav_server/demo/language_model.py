"""Stand-in for a language model, behind an OpenAI-style endpoint.

    python -m token2wav_server.demo.language_model

The piper voice, from which the demo voice was made, reads a sentence aloud. The tokenizer of the
demo turns this recording into tokens. The endpoint streams the tokens as server-sent events, at a
pace that you choose, as vLLM, SGLang or TensorRT-LLM stream the tokens of a speech language model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from token2wav_client import TokenError

MODEL = "speech"
_EVENTS = "text/event-stream"


class Message(BaseModel):
    """Message of a chat."""

    role: str
    content: str


class ChatRequest(BaseModel):
    """Body of `POST /v1/chat/completions`. Other fields are ignored."""

    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool = False


def create_app(tokens_of: Callable[[str], Iterable[int]], tokens_per_second: float) -> FastAPI:
    """Creates the ASGI application.

    Args:
        tokens_of: turns a sentence into tokens; raises TokenError for text that is no sentence.
    """
    app = FastAPI(title="language model of the demo")
    app.state.cancelled = 0

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def complete(body: ChatRequest) -> StreamingResponse:
        if not body.stream:
            raise HTTPException(400, "stream: must be true")
        try:
            tokens = await asyncio.to_thread(tokens_of, body.messages[-1].content)
        except TokenError as error:
            raise HTTPException(400, str(error)) from None
        return StreamingResponse(pieces(tokens), media_type=_EVENTS)

    async def pieces(tokens: Iterable[int]) -> AsyncGenerator[str, None]:
        start = time.monotonic()
        try:
            for position, token in enumerate(tokens):
                await asyncio.sleep(start + position / tokens_per_second - time.monotonic())
                yield _event({"delta": {"content": f"<|s_{token}|>"}, "finish_reason": None})
            yield _event({"delta": {}, "finish_reason": "stop"})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            app.state.cancelled += 1
            raise

    return app


def _event(choice: dict[str, Any]) -> str:
    piece = {"object": "chat.completion.chunk", "model": MODEL, "choices": [{"index": 0, **choice}]}
    return f"data: {json.dumps(piece)}\n\n"


def main() -> None:
    """Serves the stand-in until it is stopped."""
    parser = argparse.ArgumentParser(description="Serve a stand-in for a speech language model.")
    parser.add_argument("--port", type=int, default=9000, help="default: %(default)s")
    parser.add_argument(
        "--tokens-per-second", type=float, default=50.0, help="pace (default: %(default)s)"
    )
    options = parser.parse_args()
    # Imported here, because tests serve other tokens without these packages.
    from token2wav_server.demo.text_front_end import TextFrontEnd

    app = create_app(TextFrontEnd().tokens, options.tokens_per_second)
    uvicorn.run(app, port=options.port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
