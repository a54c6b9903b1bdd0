"""Speech that a limit of a server ends: the clients of all interfaces learn the reason."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import riva.client
from websockets.sync.client import connect

from testkit.models.golden import TINY
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig, serving, tokens_of
from testkit.rigs.gateway_speech import assert_same, body
from testkit.rigs.hostile_language_model import CUT_OFF, create_app
from testkit.rigs.realtime import audio_of, events_until, opened, say
from testkit.rigs.server_rig import Rig
from token2wav_client import ClientVoice

REPEATS = 5
MARKS = "Marks within speech."  # text whose tokens have numbers outside the vocabulary among them


def tokens(text: str) -> list[int]:
    if text == MARKS:
        said = tokens_of(text)
        return [6562, *said[:9], 6561, 99_999, *said[9:], 6562]
    return [7] * 1000 if text == "Loop." else tokens_of(text)


@pytest.fixture(scope="module")
def gateway(voice: ClientVoice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayRig]:
    folder = tmp_path_factory.mktemp("gateway")
    with (
        Rig.start(TINY, folder, f"stream: {{end_after_repeats: {REPEATS}}}") as rig,
        serving(create_app(tokens, threading.Event())) as port,
        GatewayRig.start(
            folder,
            grpc_url=rig.server.grpc_url,
            language_model_url=f"http://127.0.0.1:{port}/v1",
            voice=voice,
            settings={"voices": {"default": VOICE}},
            riva=True,
        ) as started,
    ):
        yield started


def spoken(gateway: GatewayRig, text: str) -> tuple[bytes, dict[str, object]]:
    """Says a text over a WebSocket, and returns the audio and the event `audio.done`."""
    url = f"{gateway.url.replace('http', 'ws')}/v1/audio/speech/stream"
    config = {"type": "session.config", "voice": VOICE, "stream_audio": True}
    audio = b""
    with connect(url, close_timeout=1) as socket:
        for message in (config, {"type": "input.text", "text": text}, {"type": "input.done"}):
            socket.send(json.dumps(message))
        while True:
            received = socket.recv(timeout=PATIENCE_SECONDS)
            if isinstance(received, bytes):
                audio += received
            elif (event := json.loads(received))["type"] == "audio.done":
                return audio, event


def test_the_language_model_has_cut_a_text_off(
    gateway: GatewayRig, caplog: pytest.LogCaptureFixture
) -> None:
    counted = gateway.value("cut_off_total", reason="length")
    with gateway.http() as http, caplog.at_level(logging.WARNING, "token2wav_gateway.speech"):
        for text, reason in ((CUT_OFF, "length"), ("One two three.", None)):
            whole = http.post("/v1/audio/speech", json=body(input=text, stream=False))
            assert whole.headers.get("x-end-reason") == reason
            events = http.post("/v1/audio/speech", json=body(input=text, stream=True))
            done = json.loads(events.text.strip().rpartition("data: ")[2])
            assert done.get("end_reason") == reason
            audio, done = spoken(gateway, text)
            assert len(audio) == len(whole.content)
            assert done.get("end_reason") == reason
        # The client has asked for this end, so it is neither counted nor logged.
        short = http.post("/v1/audio/speech", json=body(input=CUT_OFF, max_new_tokens=1))
        assert short.status_code == 200
    assert gateway.value("cut_off_total", reason="length") == counted + 3
    assert caplog.messages == ["a text was cut off: end_reason length"] * 3


def test_numbers_outside_the_vocabulary_harm_no_speech(gateway: GatewayRig) -> None:
    """Numbers of the language model at the start, within and at the end of a text."""
    skipped = gateway.value("skipped_numbers_total", reason="outside")
    with gateway.http() as http:
        for stream in (None, False):
            marks, plain = (
                http.post("/v1/audio/speech", json=body(input=text, stream=stream)).content
                for text in (MARKS, "One two three.")
            )
            assert_same(marks, np.frombuffer(plain, np.int16))
    audio, done = spoken(gateway, MARKS)
    assert_same(audio, np.frombuffer(plain, np.int16))
    assert not done["error"]
    assert gateway.value("skipped_numbers_total", reason="outside") == skipped + 3 * 4


def test_a_realtime_response_is_incomplete(gateway: GatewayRig) -> None:
    with opened(gateway) as connection:
        say(connection, "Loop. One two three.")
        events = events_until(connection, "response.done")
        response = events[-1].response
        assert response.status == "incomplete"
        assert response.status_details.reason == "repeats"
        assert response.output[0].content[0].transcript == "Loop. One two three."
        words = len(tokens_of("One two three."))
        assert 2 * 960 * words < len(audio_of(events)) <= 2 * 960 * (words + REPEATS)
        say(connection, "One two three.")
        assert events_until(connection, "response.done")[-1].response.status == "completed"
        say(connection, CUT_OFF)
        response = events_until(connection, "response.done")[-1].response
        assert response.status_details.reason == "max_output_tokens"


def test_the_trailing_metadata_of_a_riva_call_have_the_reason(gateway: GatewayRig) -> None:
    service = riva.client.SpeechSynthesisService(riva.client.Auth(uri=gateway.riva))
    reasons: list[tuple[str, dict[str, str]]] = [
        ("Loop.", {"end-reason": "repeats"}),
        (CUT_OFF, {"end-reason": "length"}),
        ("One two three.", {}),
    ]
    for text, reason in reasons:
        call = service.synthesize_online(text, VOICE, sample_rate_hz=24_000)
        assert sum(len(piece.audio) for piece in call) > 0
        assert dict(call.trailing_metadata()) == reason
    service.auth.channel.close()
