"""Aligners that hang: the audio arrives as without them, and the times of the words are null."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import GatewayRig
from testkit.rigs.gateway_socket import opened
from testkit.rigs.gateway_speech import assert_same, body, events_of, expected
from testkit.rigs.language_model import LanguageModel
from token2wav import Token2Wav
from token2wav_client import ClientVoice

pytestmark = pytest.mark.usefixtures("made_up_aligners")


@contextmanager
def hanging(
    rig: DoorServer, voice: ClientVoice, folder: Path, timeout_s: float
) -> Iterator[GatewayRig]:
    """A gateway with an aligner that hangs for texts with the word bad."""
    with GatewayRig.between(
        LanguageModel().app(),
        folder,
        grpc_url=rig.server.grpc_url,
        voice=voice,
        settings={"aligner": {"name": "Hangs", "timeout_s": timeout_s}},
    ) as gateway:
        yield gateway


def test_the_audio_does_not_wait_for_the_aligner(
    rig: DoorServer, voice: ClientVoice, model: Token2Wav, tmp_path: Path
) -> None:
    text = "a bad text of seven words it is"
    fields = body(input=text, stream_format="sse", word_timestamps=True)
    with (
        hanging(rig, voice, tmp_path, 4) as gateway,
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


def test_a_late_aligner_does_not_delay_the_next_sentence(
    rig: DoorServer, voice: ClientVoice, tmp_path: Path
) -> None:
    """Its times are null when the listener has heard the sentence, not at the time-out."""
    with (
        hanging(rig, voice, tmp_path, 60) as gateway,
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
