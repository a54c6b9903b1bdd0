"""Aligners that hang: the audio arrives as without them, and the times of the words are null."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from testkit.rigs.gateway_fixtures import StartGateway
from testkit.rigs.gateway_socket import opened
from testkit.rigs.gateway_speech import assert_same, body, events_of, expected
from testkit.rigs.language_model import LanguageModel
from token2wav import Token2Wav
from token2wav_client import ClientVoice

pytestmark = pytest.mark.usefixtures("made_up_aligners")


def hanging(timeout_s: float) -> dict[str, Any]:
    """Settings of an aligner that hangs for texts with the word bad."""
    return {"aligner": {"name": "Hangs", "timeout_s": timeout_s}}


def test_the_audio_does_not_wait_for_the_aligner(
    start_gateway: StartGateway, voice: ClientVoice, model: Token2Wav
) -> None:
    text = "a bad text of seven words it is"
    fields = body(input=text, stream_format="sse", word_timestamps=True)
    with (
        start_gateway(LanguageModel().app(), settings=hanging(4)) as gateway,
        gateway.http() as http,
        http.stream("POST", "/v1/audio/speech", json=fields) as answer,
    ):
        received = [(time.monotonic(), event) for event in events_of(answer.iter_lines())]
    *deltas, (late, last), (_, done) = received
    assert done["type"] == "speech.audio.done"
    assert last["timestamps"] is None
    assert_same(
        b"".join(base64.b64decode(event["audio"]) for _, event in deltas),
        expected(model, voice, text),
    )
    assert late - deltas[-1][0] > 2


def test_a_late_aligner_does_not_delay_the_next_sentence(start_gateway: StartGateway) -> None:
    """Its times are null when the listener has heard the sentence, not at the time-out."""
    with (
        start_gateway(LanguageModel().app(), settings=hanging(60)) as gateway,
        opened(gateway, word_timestamps=True) as socket,
    ):
        socket.send(type="input.text", text="A bad one.\nA good one.\n")
        socket.until("audio.chunk")
        began = time.monotonic()
        socket.until("audio.done")
        waited_s = time.monotonic() - began
    chunks = socket.of("audio.chunk")
    assert chunks[-1]["audio_b64"] == ""
    assert chunks[-1]["timestamps"] is None
    # The next sentence has half a second to be made; a busy machine needs longer.
    assert waited_s < chunks[-1]["chunk_end_ms"] / 1000 + 5
