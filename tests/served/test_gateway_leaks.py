"""Texts that fail between a language model and a real speech server keep no resources."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.failing_proxy import Proxy
from testkit.rigs.gateway_rig import TEMPLATE, VOICE
from testkit.rigs.raw_server import EVENTS_HEAD, raw_server, resets, sends, sends_and_waits
from testkit.rigs.resources import check_nothing_kept
from testkit.rigs.server_rig import Rig
from token2wav_client import ClientVoice
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.errors import ModelError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings
from token2wav_gateway.speech.content import Codes, Text
from token2wav_gateway.speech.servers import Servers
from token2wav_gateway.speech.turn import Turn
from token2wav_gateway.voices.voice_folder import Voice

TOKENS = "".join(f"<|s_{number}|>" for number in range(12))
PIECE = f"data: {json.dumps({'choices': [{'text': TOKENS}]})}\n\n".encode()
WHOLE = EVENTS_HEAD + PIECE + b"data: [DONE]\n\n"
# The outages of both servers, and clients that leave, at any time of a text.
FAILURES = {
    "language model resets": resets,
    "language model breaks off": sends(EVENTS_HEAD + PIECE),
    "speech server is down": sends_and_waits(EVENTS_HEAD + PIECE),
    "client leaves": sends(WHOLE),
}
CODES = list(range(12))
LONGEST_S = 0.05  # before a client leaves, which is about the time of a text
TOGETHER = 10  # texts at the same time
WARM_UP = 50


@contextmanager
def settings_for(failure: str, speech_port: int) -> Iterator[Settings]:
    """Serves the language model, and yields the settings of a gateway for both servers."""
    with raw_server(FAILURES[failure]) as port:
        yield Settings.model_validate(
            {
                "language_model": {
                    "url": f"http://127.0.0.1:{port}/v1",
                    "template": TEMPLATE,
                    "token_timeout_s": PATIENCE_SECONDS,
                },
                "speech_server": {
                    "url": f"127.0.0.1:{speech_port}",
                    "response_timeout_s": PATIENCE_SECONDS,
                },
            }
        )


class Failing:
    """Turns in front of servers that fail.

    Args:
        failure: name of the failure.
        proxy: proxy of the speech server.
        settings: settings for both servers.
        voice: voice to speak in.
    """

    def __init__(self, failure: str, proxy: Proxy, settings: Settings, voice: ClientVoice) -> None:
        self._leaves = failure == "client leaves"
        self._down = failure == "speech server is down"
        self._proxy = proxy
        self._settings = settings
        self._text = Text("words", Voice(VOICE, tensors=voice))
        self._pauses = random.Random(1)

    async def check(self, count: int) -> None:
        """Checks that a number of failures keeps nothing, and that the speech server works then."""
        await self._proxy.start()
        self._servers = Servers(self._settings, Metrics())
        try:
            await self._speak_codes()
            if self._down:
                await self._proxy.fail("resets")
            await check_nothing_kept(self._repeat, WARM_UP, count)
            await self._proxy.start()
            await self._speak_codes()
        finally:
            await self._servers.close()
            await self._proxy.close()

    async def _repeat(self, times: int) -> None:
        for _ in range(times // TOGETHER):
            await asyncio.gather(*(self._fail() for _ in range(TOGETHER)))

    async def _fail(self) -> None:
        speaking = asyncio.create_task(self._speak())
        if self._leaves:
            await asyncio.sleep(self._pauses.uniform(0, LONGEST_S))
            speaking.cancel()
        await asyncio.wait({speaking})
        if not self._leaves:
            assert isinstance(speaking.exception(), ModelError)

    async def _speak(self) -> None:
        async with aclosing(Turn(self._servers, self._text, Encoder("pcm")).events()) as events:
            async for _ in events:
                pass

    async def _speak_codes(self) -> None:
        voice = self._text.voice.tensors
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                turn = Turn(self._servers, Codes(CODES, voice), Encoder("pcm"))
                async with aclosing(turn.events()) as events:
                    async for _ in events:
                        pass
                assert turn.samples == 960 * len(CODES)
                return
            except ModelError:  # gRPC has not connected again yet
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("count", [50, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("failure", FAILURES)
def test_failed_texts_keep_nothing(
    rig: Rig, voice: ClientVoice, failure: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)  # records of warnings would be kept
    proxy = Proxy(rig.server.ports.grpc)
    with settings_for(failure, proxy.port) as settings:
        asyncio.run(Failing(failure, proxy, settings, voice).check(count))
    # asyncio reports errors of tasks that nobody awaits.
    assert caplog.records == []
    rig.wait_until_empty()
