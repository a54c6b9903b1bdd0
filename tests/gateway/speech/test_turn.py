"""Events of a turn, in front of servers that wait for what the client has got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from token2wav_client import AudioChunk
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import AlignerSettings, LimitSettings
from token2wav_gateway.speech.turn import Audio, Ended, Started, Text, Turn, Words
from token2wav_gateway.voices.voice_folder import Voice
from token2wav_gateway.words.word_times import WordTimes

RATE_HZ = 8000
SECOND = np.zeros(RATE_HZ, np.int16)


@pytest.mark.usefixtures("made_up_aligners")
@pytest.mark.parametrize("leaves", [False, True])
def test_words_are_told_before_the_next_audio(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aligner tells a letter for each second, and the speech server waits until it has come."""
    metrics: Any = Metrics()
    servers: Any = SimpleNamespace(limits=LimitSettings(), metrics=metrics)
    got = asyncio.Semaphore(0)

    async def speak(_: object) -> AsyncGenerator[AudioChunk, None]:
        for index in range(3):
            yield AudioChunk(SECOND, index, index == 2, 0, 0, None, sample_rate=RATE_HZ)
            await got.acquire()

    async def work() -> list[Any]:
        word_times = WordTimes(AlignerSettings(name="Follows", timeout_s=60), metrics)
        turn = Turn(
            servers, Text("abc", Voice("anna")), Encoder("pcm", RATE_HZ), word_times=word_times
        )
        events = []
        async with aclosing(turn.events()) as stream:
            async for event in stream:
                events.append(event)
                if isinstance(event, Words):
                    if leaves:
                        break
                    got.release()
        await asyncio.sleep(0)
        assert not word_times.full
        await word_times.close()
        return events

    monkeypatch.setattr(Turn, "_speak", speak)
    events = asyncio.run(work())
    kinds = [type(event) for event in events]
    if leaves:
        assert kinds == [Started, Audio, Words]
        return
    assert kinds == [Started, *[Audio, Words] * 3, Words, Ended]
    words = [
        word["word"] for event in events if isinstance(event, Words) for word in event.times or ()
    ]
    assert words == ["a", "b", "c"]
    assert events[-2].segments == [{"text": "abc", "start_ms": 0, "end_ms": 3000}]
