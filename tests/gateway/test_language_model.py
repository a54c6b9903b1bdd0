"""Client of a language model server: ids of tokens, and the check of a server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tests.support.gateway_rig import serving
from token2wav_gateway.errors import ModelError
from token2wav_gateway.language_model import LanguageModel
from token2wav_gateway.settings import LanguageModelSettings
from token2wav_gateway.template import load_template

KEY = "right"


def server(ids: str) -> FastAPI:
    """A server that answers with one event of token ids, and knows one key."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        known = request.headers.get("authorization") == f"Bearer {KEY}"
        return Response(status_code=200 if known else 401)

    @app.post("/v1/chat/completions")
    async def complete() -> Response:
        event = f'data: {{"choices": [{{"token_ids": {ids}, "finish_reason": "stop"}}]}}\n\n'
        return Response(event, media_type="text/event-stream")

    return app


def ids_of(port: int) -> list[int]:
    """Reads all tokens of an answer."""

    async def read() -> list[int]:
        settings = LanguageModelSettings(url=f"http://127.0.0.1:{port}/v1")
        model = LanguageModel(settings, load_template("cosyvoice3_ids"), 100)
        prompt = {"text": "a", "instructions": None, "voice": "b", "prompt_text": ""}
        tokens = model.tokens(**prompt, prompt_tokens=np.zeros(0, np.int32))
        try:
            async with aclosing(tokens):
                return [int(token) async for batch in tokens for token in batch]
        finally:
            await model.close()

    return asyncio.run(read())


def test_a_finish_reason_ends_an_answer() -> None:
    with serving(server("[151663, 151668]")) as port:
        assert ids_of(port) == [0, 5]


@pytest.mark.parametrize("ids", ["[1e400]", "[1099511627776]", '["x"]', "[null]", "{}1"])
def test_ids_that_are_no_tokens_are_refused(ids: str) -> None:
    with serving(server(ids)) as port, pytest.raises(ModelError, match="is no piece of an answer"):
        ids_of(port)


@pytest.mark.parametrize("key", [KEY, "wrong"])
def test_a_server_that_refuses_the_key_does_not_work(key: str) -> None:
    async def check(port: int) -> None:
        settings = LanguageModelSettings(url=f"http://127.0.0.1:{port}/v1", api_key=key)
        model = LanguageModel(settings, load_template("cosyvoice3_ids"), 100)
        try:
            await model.check()
        finally:
            await model.close()

    with serving(server("[]")) as port:
        if key == KEY:
            asyncio.run(check(port))
        else:
            with pytest.raises(ModelError, match="status 401"):
                asyncio.run(check(port))
