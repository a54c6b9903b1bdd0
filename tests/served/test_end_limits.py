"""Limits that end a stream, on a real server, for all kinds of clients. `tests/serving/
test_end_limits.py` and `tests/serving/door/test_options.py` show where they end it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import Rig
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Token2Wav
from token2wav_client import AsyncClient, AudioChunk, ClientVoice

REPEATS, SPOKEN = 8, 60


@pytest.fixture(scope="module")
def sentence(golden: GoldenSet) -> NDArray[np.int32]:
    return golden.tokens[:SPOKEN]


@pytest.fixture(scope="module")
def ended(model: Token2Wav, golden: GoldenSet, sentence: NDArray[np.int32]) -> NDArray[np.float32]:
    """Audio up to the end of the sentence, whose last token is repeated."""
    tokens = np.concatenate((sentence, np.full(REPEATS - 1, sentence[-1])))
    return model.synthesize(tokens, golden.voice)


def test_a_loop_that_never_ends_ends(
    rig: Rig, voice: ClientVoice, sentence: NDArray[np.int32], ended: NDArray[np.float32]
) -> None:
    """A language model that repeats a token for ever, at 100 tokens a second."""
    sent, stopped = itertools.count(), threading.Event()

    async def tokens() -> AsyncIterator[NDArray[np.int32]]:
        try:
            yield sentence
            while True:
                next(sent)
                yield sentence[-1:]
                await asyncio.sleep(0.01)
        finally:
            stopped.set()

    async def speak() -> list[AudioChunk]:
        async with AsyncClient(rig.server.grpc_url) as client:
            chunks = client.synthesize(tokens(), voice, end_after_repeats=REPEATS)
            return [chunk async for chunk in chunks]

    before = rig.ended()
    chunks = asyncio.run(speak())
    assert stopped.is_set()  # so the language model is no longer asked
    assert [chunk.end_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].final, chunks[-1].end_reason) == (True, "repeats")
    audio = np.concatenate([chunk.audio for chunk in chunks])
    assert audio.shape == ended.shape
    assert np.abs(audio - ended).max() <= SERVER_EQUALS_LIBRARY
    rig.wait_until_empty()
    assert rig.ended() - before == {"repeats": 1}
