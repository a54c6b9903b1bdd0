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
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from token2wav_client import TokenError
from token2wav_server import demo

MODEL = "speech"
MAX_CHARACTERS = 300
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
        for position, token in enumerate(tokens):
            await asyncio.sleep(start + position / tokens_per_second - time.monotonic())
            yield _event({"delta": {"content": f"<|s_{token}|>"}, "finish_reason": None})
        yield _event({"delta": {}, "finish_reason": "stop"})
        yield "data: [DONE]\n\n"

    return app


def _event(choice: dict[str, Any]) -> str:
    piece = {"object": "chat.completion.chunk", "model": MODEL, "choices": [{"index": 0, **choice}]}
    return f"data: {json.dumps(piece)}\n\n"


def front_end() -> Callable[[str], list[int]]:
    """Makes the function that reads a sentence aloud, and turns the recording into tokens."""
    # Imported here, because tests serve other tokens without these packages.
    from token2wav_server.demo.speaker import RATE_HZ, TOKEN_SAMPLES, Speaker
    from token2wav_voice import FrontEnd, Recording
    from token2wav_voice.recording import MAX_SECONDS

    speaker, listener = Speaker(seed=0), FrontEnd(demo.MODEL)

    def tokens_of(sentence: str) -> list[int]:
        if not any(character.isalnum() for character in sentence):
            raise TokenError("sentence: 0 words; at least 1 is needed")
        if len(sentence) > MAX_CHARACTERS:
            raise TokenError(
                f"sentence: {len(sentence)} characters; at most {MAX_CHARACTERS} are allowed"
            )
        speech = speaker.say(sentence, vary=False)
        seconds = len(speech) / RATE_HZ
        if not TOKEN_SAMPLES / RATE_HZ <= seconds <= MAX_SECONDS:
            raise TokenError(
                f"sentence: {seconds:.0f} s of speech; must be more than 0 and at most "
                f"{MAX_SECONDS:g} s"
            )
        tokens: list[int] = listener.tokens(
            Recording(Path("sentence"), speech, RATE_HZ, 1, 0.0)
        ).tolist()
        return tokens

    return tokens_of


def main() -> None:
    """Serves the stand-in until it is stopped."""
    parser = argparse.ArgumentParser(description="Serve a stand-in for a speech language model.")
    parser.add_argument("--port", type=int, default=9000, help="default: %(default)s")
    parser.add_argument(
        "--tokens-per-second", type=float, default=50.0, help="pace (default: %(default)s)"
    )
    options = parser.parse_args()
    app = create_app(front_end(), options.tokens_per_second)
    uvicorn.run(app, port=options.port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
