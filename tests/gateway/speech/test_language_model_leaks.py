"""Texts that fail, or that are cancelled at any moment of their connection, keep no resources."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager

import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.raw_server import (
    EVENTS_HEAD,
    Reply,
    raw_server,
    resets,
    sends,
    sends_and_waits,
)
from testkit.rigs.resources import check_nothing_kept
from token2wav_gateway.errors import ModelError
from token2wav_gateway.settings import LanguageModelSettings
from token2wav_gateway.speech.content import Text
from token2wav_gateway.speech.language_model import Answer, LanguageModel
from token2wav_gateway.speech.template import load_template
from token2wav_gateway.voices.voice_folder import Voice

TEXT = Text("a", Voice("b"))
TOKEN = b'data: {"choices": [{"text": "<|s_1|>"}]}\n\n'
TURNS = 50  # of the event loop, more than a request to this machine takes
TOGETHER = 10  # texts that fail at the same time
REPLIES: dict[str, Reply | None] = {
    "refused": None,
    "reset": resets,
    "closed": lambda _: None,
    "status 500": sends(b"HTTP/1.1 500 x\r\ncontent-length: 5\r\n\r\nwords"),
    "broken off": sends(EVENTS_HEAD + TOKEN),
    "silent": sends_and_waits(b""),
    "silent after a token": sends_and_waits(EVENTS_HEAD + TOKEN),
}
CANCELLED = ["refused", "reset", "silent after a token"]  # cover every turn of a connection


@contextmanager
def replying(reply: Reply | None) -> Iterator[int]:
    """Serves on a port; None refuses connections."""
    if reply is not None:
        with raw_server(reply) as port:
            yield port
        return
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))  # without listen
        yield bound.getsockname()[1]


async def read(model: LanguageModel) -> None:
    tokens = model.tokens(Answer(), TEXT)
    async with aclosing(tokens):
        async for _ in tokens:
            pass


async def fail(model: LanguageModel) -> None:
    with pytest.raises(ModelError):
        await read(model)


async def cancel(model: LanguageModel, turns: int) -> None:
    task = asyncio.create_task(fail(model))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def fail_often(url: str, cancelled: bool, count: int) -> None:
    timeout_s = PATIENCE_SECONDS if cancelled else 0.01
    settings = LanguageModelSettings(url=url, token_timeout_s=timeout_s)
    model = LanguageModel(settings, load_template("cosyvoice3"), 100)

    async def repeat(times: int) -> None:
        if cancelled:
            for number in range(times):
                await cancel(model, number % TURNS)
        else:
            for _ in range(times // TOGETHER):
                await asyncio.gather(*(fail(model) for _ in range(TOGETHER)))

    try:
        await check_nothing_kept(repeat, TURNS, count)
    finally:
        await model.close()


# A name has two addresses, of which the first may refuse.
@pytest.mark.parametrize(
    ("host", "count"),
    [
        ("127.0.0.1", TURNS),
        pytest.param("localhost", 5000, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("reply", "cancelled"),
    [(reply, False) for reply in REPLIES] + [(reply, True) for reply in CANCELLED],
)
def test_failed_texts_keep_nothing(reply: str, cancelled: bool, host: str, count: int) -> None:
    with replying(REPLIES[reply]) as port:
        asyncio.run(fail_often(f"http://{host}:{port}/v1", cancelled, count))
