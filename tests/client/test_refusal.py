"""Utterances that the server answers with an error, by both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.fake_triton import fake_triton, refused
from token2wav_client import AsyncClient, Client, ServerError, utterance

SENTENCE = "voice: unknown"
TOKENS = [1, 2, 3]


def by_threads(url: str) -> None:
    with Client(url) as client, client.open() as opened:
        opened.push(TOKENS)  # and the utterance stays open
        list(opened)


def by_tasks(url: str) -> None:
    async def run() -> None:
        async with AsyncClient(url) as client, await client.open() as opened:
            opened.push(TOKENS)
            [chunk async for chunk in opened]

    asyncio.run(run())


both = pytest.mark.parametrize("speak", [by_threads, by_tasks])


@both
def test_a_refused_client_ends_its_requests(
    speak: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utterance, "_ERROR_GRACE_S", PATIENCE_SECONDS)
    with fake_triton(refused(SENTENCE)) as (url, server):
        with pytest.raises(ServerError, match=SENTENCE):
            speak(url)
        assert server.half_closed == 1


@both
def test_a_stream_that_goes_on_after_its_error_is_cancelled(speak: Callable[[str], None]) -> None:
    with fake_triton(refused(SENTENCE)) as (url, server):
        server.ends_streams = False
        with pytest.raises(ServerError, match=SENTENCE):
            speak(url)
