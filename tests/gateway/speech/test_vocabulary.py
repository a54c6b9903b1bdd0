"""Vocabulary of the speech server: when the server is asked for it."""

from __future__ import annotations

import asyncio

from token2wav_gateway.speech.vocabulary import Vocabulary


class Server:
    """Speech server that counts its answers.

    Attributes:
        told: its answer.
        answers: number of answers so far.
        now: time on the clock, in seconds.
    """

    def __init__(self) -> None:
        self.told: tuple[int, ...] = ()
        self.answers = 0
        self.now = 0.0

    async def vocabulary(self) -> tuple[int, ...]:
        await asyncio.sleep(0)
        self.answers += 1
        return self.told


def test_a_server_is_asked_every_ten_seconds_for_all_texts_together() -> None:
    async def ask() -> None:
        server = Server()
        vocabulary = Vocabulary(server.vocabulary, lambda: server.now)
        for now, told, known in (
            (0.0, (), ()),
            (9.9, (8, 4), ()),  # the answer without a vocabulary is still valid
            (10.0, (8, 4), (8, 4)),
            (20.0, (), (8, 4)),
            (30.0, (2048,), (2048,)),
        ):
            server.now, server.told = now, told
            texts = [vocabulary.sizes() for _ in range(3)]
            assert await asyncio.gather(*texts) == 3 * [known], now
        assert server.answers == 4

    asyncio.run(ask())
