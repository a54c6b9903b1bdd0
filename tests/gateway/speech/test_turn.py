"""Events of a turn, in front of servers that wait for what the client has got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from token2wav_client import AudioChunk, ServerError
from token2wav_gateway.access import Holder
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.errors import ModelBusyError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import AlignerSettings, KeySettings, LimitSettings, TextSettings
from token2wav_gateway.speech import turn
from token2wav_gateway.speech.content import Audio, Codes, Ended, Started, Text, Words
from token2wav_gateway.speech.servers import speech_error
from token2wav_gateway.speech.turn import Turn
from token2wav_gateway.voices.voice_folder import Voice
from token2wav_gateway.words.normaliser import Normaliser
from token2wav_gateway.words.word_times import WordTimes

RATE_HZ = 8000
SECOND = np.zeros(RATE_HZ, np.int16)


def servers() -> Any:
    parts = {"limits": LimitSettings(), "metrics": Metrics()}
    return SimpleNamespace(**parts, normaliser=Normaliser(TextSettings(), 4096), full=False)


def new_turn(word_times: Any) -> Turn:
    content = Text("abc", Voice("anna"))
    return Turn(servers(), content, Encoder("pcm", RATE_HZ), word_times=word_times)


@pytest.mark.parametrize("full", [False, True])
def test_a_text_that_is_refused_is_not_changed(full: bool) -> None:
    settings = KeySettings(name="shop", sha256="0" * 64, requests_per_minute=1)
    holder = Holder(settings, lambda: 0.0)
    behind = servers()
    behind.full = full
    behind.normaliser = Normaliser(TextSettings(pronunciations={"abc": "spoken"}), 4096)

    async def spoken() -> str:
        content = Text("abc", Voice("anna"))
        return await Turn(behind, content, Encoder("pcm", RATE_HZ), holder=holder).spoken_text()

    assert asyncio.run(spoken()) == ("abc" if full else "spoken")
    assert asyncio.run(spoken()) == "abc"  # the second request of a minute


class Found:
    """Text of which one word is known, but not taken, when the time for the others has ended."""

    def __init__(self) -> None:
        self.found = [{"word": "a", "start_ms": 0, "end_ms": 1000}]

    def add(self, samples: object) -> None:
        pass

    async def arrival(self) -> None:
        await asyncio.Event().wait()

    async def rest(self, seconds: float) -> tuple[None, list[Any]]:
        return None, []

    def take(self) -> list[dict[str, Any]]:
        found, self.found = self.found, []
        return found

    def close(self) -> None:
        pass


def test_a_speed_that_a_codec_refuses_is_an_error_of_the_request() -> None:
    error = speech_error(ServerError("speed: 1.5, but this model has no mel"))
    assert (error.status, error.param) == (400, "speed")


def test_audio_that_is_cut_off_by_the_end_of_the_gateway_is_not_complete() -> None:
    """At a second interrupt, the client of the speech server is closed, and yields no more."""

    async def chunks(*_: object, **__: object) -> AsyncGenerator[AudioChunk, None]:
        yield AudioChunk(SECOND, 0, False, 0, 0, None, sample_rate=RATE_HZ)

    async def work() -> None:
        async for event in Turn(behind, Codes([1], None), Encoder("pcm", RATE_HZ)).events():
            kinds.append(type(event))

    behind, kinds = servers(), list[type]()
    behind.busy, behind.client = nullcontext, SimpleNamespace(synthesize=chunks)
    with pytest.raises(ModelBusyError, match="gateway: shutting down"):
        asyncio.run(work())
    assert kinds == [Started, Audio]


def test_a_long_chunk_is_encoded_while_other_clients_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = 8
    audio = np.random.default_rng(0).integers(-5000, 5000, 24_000 * seconds).astype(np.int16)

    async def speak(_: object) -> AsyncGenerator[AudioChunk, None]:
        yield AudioChunk(audio, 0, True, 0, 0, None, sample_rate=24_000)

    async def work() -> tuple[bytes, int]:
        content, turns = b"", 0

        async def take() -> None:
            nonlocal content
            async for event in Turn(servers(), Text("abc", Voice("anna")), Encoder("mp3")).events():
                content += event.content if isinstance(event, Audio) else b""

        taking = asyncio.create_task(take())
        while not taking.done():
            await asyncio.sleep(0)
            turns += 1
        await taking
        return content, turns

    monkeypatch.setattr(Turn, "_speak", speak)
    content, turns = asyncio.run(work())
    at_once = Encoder("mp3")
    assert content == at_once.encode(audio) + at_once.finish()
    assert turns > 2 * seconds - 1  # of the event loop, one for each half of a second


def test_words_that_are_known_are_sent_before_the_others_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def speak(_: object) -> AsyncGenerator[AudioChunk, None]:
        yield AudioChunk(SECOND, 0, True, 0, 0, None, sample_rate=RATE_HZ)

    async def work() -> list[Any]:
        return [event async for event in new_turn("any").events() if isinstance(event, Words)]

    spoken = Found()
    monkeypatch.setattr(Turn, "_speak", speak)
    monkeypatch.setattr(turn, "SpokenText", lambda *_: spoken)
    known = list(spoken.found)
    assert [words.times for words in asyncio.run(work())] == [known, None]


def test_a_second_cancel_waits_for_the_end_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def speak(_: object) -> AsyncGenerator[AudioChunk, None]:
        try:
            yield AudioChunk(SECOND, 0, False, 0, 0, None, sample_rate=RATE_HZ)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            ended.append(True)

    async def take(begun: asyncio.Event) -> None:
        async with aclosing(new_turn("any").events()) as events:
            async for _ in events:
                begun.set()

    async def work() -> None:
        task = asyncio.create_task(take(begun := asyncio.Event()))
        await begun.wait()
        for _ in range(3):
            await asyncio.sleep(0.02)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True]

    monkeypatch.setattr(Turn, "_speak", speak)
    monkeypatch.setattr(turn, "SpokenText", lambda *_: Found())
    asyncio.run(work())


@pytest.mark.usefixtures("made_up_aligners")
@pytest.mark.parametrize("leaves", [False, True])
def test_words_are_told_before_the_next_audio(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aligner tells a letter for each second, and the speech server waits until it has come."""
    got = asyncio.Semaphore(0)

    async def speak(_: object) -> AsyncGenerator[AudioChunk, None]:
        for index in range(3):
            yield AudioChunk(SECOND, index, index == 2, 0, 0, None, sample_rate=RATE_HZ)
            await got.acquire()

    async def work() -> list[Any]:
        word_times = WordTimes(AlignerSettings(name="Follows", timeout_s=60), Metrics())
        events = []
        async with aclosing(new_turn(word_times).events()) as stream:
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
