"""Clock of the accumulator, which never learns when later stages send audio."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest.mock import Mock

import pytest

from tests.server.test_service import FakeTriton
from tests.support.tiny_model import TINY, demo_tokens, demo_voice
from token2wav.config import ServerConfig
from token2wav.serving.audio_output import AudioFormat
from token2wav.serving.chunking import Chunker, HopSchedule
from token2wav.serving.clocks import Playback

HELD_BACK_SECONDS = (4 * 480 + 4) / 24_000  # by the vocoder of the tiny model
MODULES = [
    f"token2wav_server.{name}"
    for name in ("triton_request", "triton_reply", "metrics", "voices", "ensemble.wire")
]
MODULES.append("token2wav_server.ensemble.accumulator")


@pytest.fixture
def accumulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with a stand-in for Triton's."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeTriton())
    yield importlib.import_module("token2wav_server.ensemble.accumulator")
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("more", [0.0, 1.0])
def test_audio_that_the_vocoder_holds_back_does_not_count_as_sent(
    accumulator: ModuleType, more: float
) -> None:
    """`more` seconds are held back, as by a trimming of silence: until they are over, the stream
    counts as unheard.
    """
    server, voice = ServerConfig(), demo_voice(0)
    made = accumulator.Accumulator(TINY, server)
    try:
        playback = Playback(clock=lambda: 0.0)
        config = made._config
        chunker = Chunker(
            voice.prompt_tokens, config, HopSchedule.of(server.stream, config), playback
        )
        held_back = made._held_back + more
        assert made._held_back == pytest.approx(HELD_BACK_SECONDS)
        stream = accumulator._Stream(
            chunker, playback, voice, "", Mock(steps=0, audio_format=AudioFormat()), held_back
        )
        chunker.push(demo_tokens(8 + config.lookahead_tokens))
        made._send_chunks(stream, Mock())
        assert chunker.spoken == 8
        expected = 8 / 25 - HELD_BACK_SECONDS if not more else 0.0
        assert playback.seconds_sent == pytest.approx(expected)
        assert (playback.started is None) == bool(more)
        chunker.push(demo_tokens(60))
        made._send_chunks(stream, Mock())
        assert playback.seconds_sent == pytest.approx(chunker.spoken / 25 - held_back)
    finally:
        made.close()
