"""Clock of the accumulator, which gets no message when later stages send audio."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest.mock import Mock

import pytest

from testkit.models.tiny_model import TINY, demo_tokens, demo_voice
from testkit.triton import FakeTriton
from token2wav.config import ServerConfig
from token2wav.serving.door.message import Message
from token2wav.serving.door.sequences import Owner

HELD_BACK_SECONDS = (4 * 480 + 4) / 24_000  # by the vocoder of the tiny model
MODULES = [
    f"token2wav_server.{name}"
    for name in ("triton_request", "triton_reply", "voices", "ensemble.wire")
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
def test_audio_held_back_does_not_count_as_sent(accumulator: ModuleType, more: float) -> None:
    """`more` seconds are held back, as by a trimming of silence: until they are over, the stream
    counts as unheard.
    """
    config = ServerConfig()
    made = accumulator.Accumulator(TINY, config)

    def message(tokens: int) -> Message:
        return Message(
            sequence_id=1,
            start=True,
            end=False,
            owner=Owner(),
            parameters={},
            tokens=demo_tokens(tokens),
            voice_inputs=vars(demo_voice(0)),
        )

    try:
        first = message(config.stream.first_tokens + config.stream.provisional_lookahead_tokens)
        stream = made._open(first, first.options())
        assert stream.held_back == pytest.approx(HELD_BACK_SECONDS)
        stream.held_back += more
        chunker, playback = stream.request.chunker, stream.request.playback
        playback.now = lambda: 0.0
        made._push(stream, first, Mock(), Mock())
        assert chunker.spoken == config.stream.first_tokens
        expected = chunker.spoken / 25 - HELD_BACK_SECONDS if not more else 0.0
        assert playback.seconds_sent == pytest.approx(expected)
        assert (playback.started is None) == bool(more)
        made._push(stream, message(60), Mock(), Mock())
        assert playback.seconds_sent == pytest.approx(
            chunker.spoken / 25 - HELD_BACK_SECONDS - more
        )
    finally:
        made.close()
