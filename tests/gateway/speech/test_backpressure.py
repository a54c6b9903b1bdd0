"""Back-pressure of an utterance, without a server: which tokens pass, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from token2wav_client import AudioChunk
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.speech import backpressure
from token2wav_gateway.speech.backpressure import Backpressure

pytestmark = pytest.mark.anyio

AHEAD_S, TOKEN_S, BATCH = 2.0, 0.04, 10
LIMIT = int(AHEAD_S / TOKEN_S)  # tokens


def chunk(tokens: int) -> AudioChunk:
    audio = np.zeros(960 * tokens, np.int16)
    return AudioChunk(audio, 0, False, 0.0, 0.0, None, sample_rate=24_000, samples_per_token=960)


class Utterance:
    """Utterance of a language model that is as fast as it is read.

    Attributes:
        read: tokens that were read of the language model.
        closed: whether the answer of the language model was closed.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.read, self.closed = 0, False
        self.metrics = Metrics()
        self.pressure = Backpressure(AHEAD_S, self.metrics.held_back, speed)

    async def answer(self) -> AsyncGenerator[NDArray[np.int32], None]:
        try:
            while True:
                self.read += BATCH
                yield np.zeros(BATCH, np.int32)
                await asyncio.sleep(0)
        finally:
            self.closed = True

    async def send(self) -> None:
        async with aclosing(self.pressure.hold_back(self.answer())) as batches:
            async for _ in batches:
                pass

    @property
    def held(self) -> float:
        return self.metrics.registry.get_sample_value("token2wav_gateway_held_back") or 0.0


@asynccontextmanager
async def spoken(speed: float = 1.0) -> AsyncIterator[Utterance]:
    """Sends the tokens of an utterance meanwhile, and checks that all is closed afterwards."""
    utterance = Utterance(speed)
    sending = asyncio.create_task(utterance.send())
    try:
        yield utterance
    finally:
        sending.cancel()
        await asyncio.wait({sending})
    assert utterance.closed
    assert utterance.held == 0


async def turns() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def test_a_client_that_does_not_come_back_holds_the_language_model_back() -> None:
    async with spoken() as utterance:
        await turns()
        assert utterance.held == 1
        assert utterance.read <= LIMIT + BATCH  # before anybody knows the audio of a token
        utterance.pressure.take(chunk(4))
        await turns()
        read = utterance.read
        assert LIMIT < read <= LIMIT + 4 + BATCH
        assert utterance.held == 1
        await turns()
        assert utterance.read == read
        utterance.pressure.take(chunk(2 * BATCH))  # makes room for two batches
        await turns()
        assert utterance.read == read + 2 * BATCH


async def test_fast_speech_needs_more_tokens_for_as_much_audio() -> None:
    async with spoken(speed=2) as utterance:
        utterance.pressure.take(chunk(2))  # audio of 4 tokens
        await turns()
        assert 2 * LIMIT < utterance.read <= 2 * LIMIT + 4 + BATCH


async def test_a_speech_server_that_needs_more_tokens_gets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backpressure, "_STARVED_S", 0.05)
    monkeypatch.setattr(backpressure, "_POLL_S", 0.02)
    async with spoken() as utterance:
        with utterance.pressure.waiting():
            while utterance.read < 10 * LIMIT:
                await asyncio.sleep(0.01)


async def test_a_batch_passes_now_and_then_to_keep_the_stream_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backpressure, "_KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(backpressure, "_POLL_S", 0.02)
    async with spoken() as utterance:
        utterance.pressure.take(chunk(1))
        await turns()
        read = utterance.read
        while utterance.read < read + 3 * BATCH:
            await asyncio.sleep(0.01)
