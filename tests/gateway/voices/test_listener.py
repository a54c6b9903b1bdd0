"""Listener: recordings are computed one at a time, whatever their clients do."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from examples.demo_voice.recordings import PROMPT
from testkit.patience import PATIENCE_SECONDS
from tests.gateway.voices.test_voice_folder import TENSORS
from token2wav_client import ClientVoice
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.voices import listener
from token2wav_gateway.voices.listener import Listener

pytestmark = pytest.mark.anyio


class SlowFrontEnd:
    """Front end that computes voices until `goes_on` is set.

    Attributes:
        count: number of recordings that it has begun to compute.
        most: largest number of recordings at the same time.
        goes_on: lets all recordings end.
    """

    def __init__(self) -> None:
        self.count = self.most = 0
        self.goes_on = threading.Event()
        self._running = 0

    def voice_of(self, recording: bytes, field: str) -> ClientVoice:
        self.count += 1
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            assert self.goes_on.wait(PATIENCE_SECONDS)
        finally:
            self._running -= 1
        return ClientVoice(**TENSORS)


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> SlowFrontEnd:
    slow = SlowFrontEnd()

    def voice_of(_: Listener, recording: bytes, field: str) -> ClientVoice:
        return slow.voice_of(recording, field)

    monkeypatch.setattr(Listener, "_computed", voice_of)
    return slow


async def test_a_recording_is_hashed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest recording takes 30 ms, in which no other stream would get audio."""
    goes_on = threading.Event()

    def digest(recording: bytes) -> bytes:
        assert goes_on.wait(PATIENCE_SECONDS)
        return recording

    monkeypatch.setattr(listener, "_digest", digest)
    asyncio.get_running_loop().call_later(0.02, goes_on.set)
    assert await Listener(Path("model"), longest_s=30).known(b"sound") is None


def test_a_model_by_name_that_cannot_be_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    nowhere = Listener(Path("acme/nowhere"), longest_s=30)
    with pytest.raises(GatewayError, match="file: the model cannot turn it into a voice"):
        nowhere.voice_of(PROMPT.read_bytes(), "file")
