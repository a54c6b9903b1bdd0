"""Utterances that the server answers with an error, by both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from testkit.rigs.fake_triton import fake_triton, refused
from token2wav_client import AsyncClient, Client, ServerError

SENTENCE = "voice: unknown"
TOKENS = [1, 2, 3]


def by_threads(url: str) -> None:
    with Client(url) as client, client.open() as utterance:
        utterance.push(TOKENS)  # and the utterance stays open
        list(utterance)


def by_tasks(url: str) -> None:
    async def run() -> None:
        async with AsyncClient(url) as client, await client.open() as utterance:
            utterance.push(TOKENS)
            [chunk async for chunk in utterance]

    asyncio.run(run())


@pytest.mark.parametrize("speak", [by_threads, by_tasks])
@pytest.mark.parametrize("ends", [True, False])
def test_a_refused_client_ends_its_requests(speak: Callable[[str], None], ends: bool) -> None:
    """It cancels only if the server does not end the stream then."""
    with fake_triton(refused(SENTENCE)) as (url, server):
        server.ends_streams = ends
        with pytest.raises(ServerError, match=SENTENCE):
            speak(url)
        assert server.half_closed == 1
