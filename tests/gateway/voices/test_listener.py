"""Listener: hashes of recordings, and a model that cannot be pulled."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from examples.demo_voice.recordings import PROMPT
from testkit.patience import PATIENCE_SECONDS
from token2wav_client import ClientVoice
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.voices import listener
from token2wav_gateway.voices.listener import Listener

pytestmark = pytest.mark.anyio


async def test_a_recording_is_hashed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest recording takes 30 ms, in which no other stream would get audio."""
    goes_on = threading.Event()

    def digest(recording: bytes) -> bytes:
        assert goes_on.wait(PATIENCE_SECONDS)
        return recording

    monkeypatch.setattr(listener, "_digest", digest)
    asyncio.get_running_loop().call_later(0.02, goes_on.set)
    knowing = Listener(Path("model"), longest_s=30)
    voice = ClientVoice(
        np.zeros(3, np.int32), np.zeros((6, 80), np.float32), np.ones(192, np.float32)
    )
    knowing._known.put(b"sound", (voice.id, voice))
    assert await knowing.voice(b"sound", "file") is voice


def test_a_model_by_name_that_cannot_be_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    nowhere = Listener(Path("acme/nowhere"), longest_s=30)
    with pytest.raises(GatewayError, match="file: the model cannot turn it into a voice"):
        nowhere.voice_of(PROMPT.read_bytes(), "file")
