"""Vocabulary of the speech server: when the server is asked for it."""

from __future__ import annotations

import asyncio

from token2wav_gateway.vocabulary import Vocabulary


def test_a_server_is_asked_until_it_tells_its_vocabulary() -> None:
    told: list[tuple[int, ...]] = [(), (8, 4), (2048,)]

    async def ask() -> tuple[int, ...]:
        return told.pop(0)

    async def sizes(times: int) -> list[tuple[int, ...]]:
        vocabulary = Vocabulary(ask)
        return [await vocabulary.sizes() for _ in range(times)]

    assert asyncio.run(sizes(3)) == [(), (8, 4), (8, 4)]
