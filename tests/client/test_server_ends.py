"""Utterances that the server ends with an error or because of a limit, by both clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.fake_triton import fake_triton, refused, response
from token2wav_client import AsyncClient, Client, ServerError, aio_client, client, utterance

SENTENCE = "voice: unknown"
TOKENS = [1, 2, 3]

Speak = Callable[[str], list[str | None]]


def by_threads(url: str) -> list[str | None]:
    """Synthesizes tokens that never end. Returns the `end_reason` of each chunk."""
    left = threading.Event()

    def tokens() -> Iterator[list[int]]:
        yield TOKENS
        left.wait()

    try:
        with Client(url) as speaker:
            return [chunk.end_reason for chunk in speaker.synthesize(tokens())]
    finally:
        left.set()


def by_tasks(url: str) -> list[str | None]:
    async def tokens() -> AsyncIterator[list[int]]:
        yield TOKENS
        await asyncio.Event().wait()

    async def run() -> list[str | None]:
        async with AsyncClient(url) as speaker:
            return [chunk.end_reason async for chunk in speaker.synthesize(tokens())]

    return asyncio.run(run())


both = pytest.mark.parametrize("speak", [by_threads, by_tasks])


@both
def test_a_refused_client_ends_its_requests(speak: Speak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utterance, "_ERROR_GRACE_S", PATIENCE_SECONDS)
    with fake_triton(refused(SENTENCE)) as (url, server):
        with pytest.raises(ServerError, match=SENTENCE):
            speak(url)
        assert server.half_closed == 1


@both
def test_a_stream_that_goes_on_after_its_error_is_cancelled(speak: Speak) -> None:
    with fake_triton(refused(SENTENCE)) as (url, server):
        server.ends_streams = False
        with pytest.raises(ServerError, match=SENTENCE):
            speak(url)


def at_its_limit(request: Any, audio: npt.NDArray[Any]) -> Iterator[Any]:
    """Answers the first tokens with the final chunk."""
    numbers = {"chunk_index": np.array([0], np.int32), "end_reason": np.array([1], np.int32)}
    outputs = {"audio": audio, "final": np.array([True])} | numbers
    yield response(request.id, outputs, last=True)


@both
def test_a_client_at_a_limit_ends_its_requests(
    speak: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (client, aio_client):
        monkeypatch.setattr(module, "CLOSE_GRACE_S", PATIENCE_SECONDS)
    with fake_triton(at_its_limit) as (url, server):
        assert speak(url) == ["repeats"]
        assert server.half_closed == 1
