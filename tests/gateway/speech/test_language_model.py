"""Client of a language model server: the tokens of an answer, the check of a server, and answers
that fail.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from typing import Any

import pytest

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.raw_server import (
    EVENTS_HEAD,
    Reply,
    raw_server,
    read_request,
    resets,
    sends,
    sends_and_waits,
    sends_forever,
)
from testkit.rigs.resources import check_nothing_kept
from token2wav_gateway.errors import ModelError
from token2wav_gateway.settings import LanguageModelSettings
from token2wav_gateway.speech.content import Text
from token2wav_gateway.speech.language_model import Answer, LanguageModel
from token2wav_gateway.speech.template import load_template
from token2wav_gateway.voices.voice_folder import Voice

KEY = "right"
TEXT = Text("a", Voice("b"))
SHORT_S = 0.2  # time-out of a server that must run into it


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def tokens(*numbers: int, **choice: Any) -> str:
    return event(delta={"content": "".join(f"<|s_{number}|>" for number in numbers)}, **choice)


def ids(numbers: str) -> str:
    return f'data: {{"choices": [{{"token_ids": {numbers}, "finish_reason": "stop"}}]}}\n\n'


@asynccontextmanager
async def language_model(
    port: int, template: str = "cosyvoice3", host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[LanguageModel]:
    """Yields a client of the server at a port, which takes at most 100 tokens."""
    url = LanguageModelSettings(url=f"http://{host}:{port}/v1/", **settings)
    model = LanguageModel(url, load_template(template), 100)
    try:
        yield model
    finally:
        await model.close()


async def read(model: LanguageModel, answer: Answer | None = None) -> list[int]:
    """Reads all tokens of an answer."""
    async with aclosing(model.tokens(answer or Answer(), TEXT)) as batches:
        return [int(token) async for batch in batches for token in batch]


def tokens_of(
    reply: Reply, template: str = "cosyvoice3", answer: Answer | None = None, **settings: Any
) -> list[int]:
    async def run(port: int) -> list[int]:
        async with language_model(port, template, **settings) as model:
            return await read(model, answer)

    with raw_server(reply) as port:
        return asyncio.run(run(port))


def check(reply: Reply, **settings: Any) -> None:
    async def run(port: int) -> None:
        async with language_model(port, **settings) as model:
            await model.check()

    with raw_server(reply) as port:
        asyncio.run(run(port))


def answer(events: str, content_type: str = "text/event-stream") -> Reply:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\nconnection: close\r\n\r\n"
    return sends(head.encode() + events.encode())


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (tokens(1) + tokens(2) + "data: [DONE]\n\n", [1, 2]),
        (
            tokens(1) + "event: ping\n\ndata:\n\n: comment\n\n" + tokens(2, finish_reason="x"),
            [1, 2],
        ),
        (tokens(1, index=0) + tokens(8, index=1) + tokens(2, index=0, finish_reason="x"), [1, 2]),
        (tokens(8, index=1, finish_reason="x") + tokens(1, index=0, finish_reason="x"), [1]),
        (tokens(1, finish_reason="stop") + tokens(8) + "data: [DONE]\n\n", [1]),
        (tokens(1) + 'data: {"choices": [], "error": null}\n\n' + "data: [DONE]\n\n", [1]),
        (event(text="<|s_4|>", finish_reason="length"), [4]),
        (tokens(1) + "data: [DONE]\n\n" + tokens(8), [1]),
        (event(delta={"tts_content": {"tts_audio": "<|s_4|>"}}, finish_reason="stop"), [4]),
        (tokens(1, 6562, 2) + tokens(8, finish_reason="stop"), [1]),
        (  # several choices in one event
            'data: {"choices": [{"index": 1, "text": "<|s_8|>"}, {"text": "<|s_1|>"}]}\n\n'
            "data: [DONE]\n\n",
            [1],
        ),
    ],
)
def test_tokens_of_an_answer(events: str, expected: list[int]) -> None:
    assert tokens_of(answer(events)) == expected


def test_an_answer_ends_with_its_finish_reason() -> None:
    """The server sends no more, and does not close the connection either."""
    for end in (tokens(1, finish_reason="stop"), tokens(1, 6562)):
        reply = sends_and_waits(EVENTS_HEAD + end.encode())
        assert tokens_of(reply, token_timeout_s=PATIENCE_SECONDS) == [1]


@pytest.mark.parametrize(
    ("last", "cut_off"),
    [
        (tokens(2, finish_reason="length"), True),
        (tokens(2, finish_reason="stop"), False),
        (tokens(2, 6562, finish_reason="length"), False),  # the speech is complete
    ],
)
def test_an_answer_says_whether_it_was_cut_off(last: str, cut_off: bool) -> None:
    seen = Answer()
    assert tokens_of(answer(tokens(1) + last), answer=seen) == [1, 2]
    assert seen.cut_off == cut_off


def test_an_answer_counts_numbers_that_are_no_speech() -> None:
    seen = Answer()
    text = "<audio_5><audio_6561><audio_6561><audio_7>"
    assert tokens_of(answer(event(text=text, finish_reason="x")), "stepaudio2", seen) == [5, 7]
    assert seen.skipped == {"padding": 2}
    with pytest.raises(ModelError, match="no speech token; numbers that are no speech: 1"):
        tokens_of(answer(event(text="<custom_token_3>", finish_reason="x")), "orpheus")


def test_ids_of_tokens() -> None:
    """vLLM sends the id of the stop token last."""
    numbers = f"[{151646 + 278}, 5, {151924 + 5}, {151924 + 6562}]"
    assert tokens_of(answer(ids(numbers)), "cosyvoice3_ids") == [0, 5]


@pytest.mark.parametrize("numbers", ["[1e400]", '["x"]', '["\u0665"]', "[1.5]", "[null]", "{}1"])
def test_ids_that_are_no_tokens_are_refused(numbers: str) -> None:
    with pytest.raises(ModelError, match="is no piece of an answer"):
        tokens_of(answer(ids(numbers)), "cosyvoice3_ids")


@pytest.mark.parametrize(
    ("content_type", "good"),
    [
        ("text/event-stream", True),
        ("Text/Event-Stream; charset=UTF-8", True),
        ('text/event-stream; charset="utf-8"', True),
        ("text/event-stream; charset=made-up", False),
        ("text/event-stream; charset=utf-16", False),
        ("text/html", False),
        ("text/event-stream-of-another-kind", False),
    ],
)
def test_an_answer_in_another_type_or_charset_is_refused(content_type: str, good: bool) -> None:
    reply = answer(tokens(1, finish_reason="stop"), content_type)
    if good:
        assert tokens_of(reply) == [1]
        return
    with pytest.raises(ModelError, match="the answer is not text/event-stream in UTF-8") as caught:
        tokens_of(reply)
    assert caught.value.status == 502


EARLY = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
STATUS = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("head", "piece", "reason"),
    [
        (b"", EARLY, "no answer in time"),
        (STATUS, b"x: y\r\n", "the answer is not HTTP: Too many headers"),
        (STATUS + b"x: ", b"y" * 60_000, "the answer is not HTTP: Got more than 8190 bytes"),
        (b"", b"x" * 60_000, "the answer is not HTTP: "),
    ],
)
@pytest.mark.parametrize("ask", [tokens_of, check])
def test_an_answer_without_end_is_refused(
    ask: Callable[..., object], head: bytes, piece: bytes, reason: str
) -> None:
    short: dict[str, Any] = {"connect_timeout_s": SHORT_S, "token_timeout_s": SHORT_S}
    options = short if piece == EARLY else {}
    with pytest.raises(ModelError, match=reason) as caught:
        ask(sends_forever(head, piece), **options)
    assert "yyy" not in caught.value.summary


@pytest.mark.parametrize(
    ("status", "reason"), [(200, ""), (404, ""), (401, "status 401"), (503, "status 503")]
)
def test_the_check_of_a_server(status: int, reason: str) -> None:
    seen = []

    def reply(connection: socket.socket) -> None:
        seen.append(read_request(connection))
        connection.sendall(f"HTTP/1.1 {status} x\r\ncontent-length: 5\r\n\r\nwords".encode())

    if reason:
        with pytest.raises(ModelError, match=f"language model: {reason}"):
            check(reply, api_key=KEY)
    else:
        check(reply, api_key=KEY)
    assert seen[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert f"Authorization: Bearer {KEY}".encode().lower() in seen[0].lower()


def test_the_check_reads_the_status_alone() -> None:
    sent, closed = 0, False

    def reply(connection: socket.socket) -> None:
        nonlocal sent, closed
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                sent += connection.send(b"x" * 65_536)
        except OSError:
            closed = True

    check(reply)
    until(lambda: closed)
    assert sent < 32 << 20


# Texts that fail, or that are cancelled at any moment of their connection, keep no resources.

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


async def fail(model: LanguageModel) -> None:
    with pytest.raises(ModelError):
        await read(model)


async def cancel(model: LanguageModel, turns: int) -> None:
    task = asyncio.create_task(fail(model))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def fail_often(host: str, port: int, cancelled: bool, count: int) -> None:
    async def repeat(times: int) -> None:
        if cancelled:
            for number in range(times):
                await cancel(model, number % TURNS)
        else:
            for _ in range(times // TOGETHER):
                await asyncio.gather(*(fail(model) for _ in range(TOGETHER)))

    timeout_s = PATIENCE_SECONDS if cancelled else 0.01
    async with language_model(port, host=host, token_timeout_s=timeout_s) as model:
        await check_nothing_kept(repeat, TURNS, count)


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
        asyncio.run(fail_often(host, port, cancelled, count))
