"""Recent answers: requests at the same time share one, and an error is an answer too."""

from __future__ import annotations

import asyncio

import pytest

from token2wav_gateway.errors import ModelError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings
from token2wav_gateway.speech.recent import Recent
from token2wav_gateway.speech.servers import Servers

pytestmark = pytest.mark.anyio

REQUESTS = 100


async def test_requests_share_an_answer() -> None:
    now, asked, works = 0.0, 0, True

    async def ask() -> str:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if not works:
            raise ModelError("speech server: gone")
        return "works"

    recent = Recent(ask, 1.0, lambda: now)

    async def failures() -> int:
        answers = (recent.get() for _ in range(REQUESTS))
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        failed = sum(isinstance(one, ModelError) for one in outcomes)
        assert outcomes.count("works") == REQUESTS - failed
        return failed

    assert (await failures(), asked) == (0, 1)
    now, works = 0.9, False
    assert (await failures(), asked) == (0, 1)
    now = 1.0
    assert (await failures(), asked) == (REQUESTS, 2)
    now, works = 2.0, True
    assert (await failures(), asked) == (0, 3)


async def test_the_last_vocabulary_stays_if_the_server_tells_none() -> None:
    servers, told = Servers(Settings(), Metrics()), [(), (8, 4), (), (2048,)]

    async def vocabulary() -> tuple[int, ...]:
        return told.pop(0)

    servers.client.vocabulary = vocabulary  # type: ignore[method-assign]
    servers.vocabulary = Recent(servers._ask_vocabulary, 0.0)
    try:
        known = [await servers.vocabulary.get() for _ in range(4)]
    finally:
        await servers.close()
    assert known == [(), (8, 4), (8, 4), (2048,)]
