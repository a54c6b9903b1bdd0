"""Text as it is spoken: every door speaks the changed text, and answers with it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import riva.client

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs import gateway_socket, realtime
from testkit.rigs.gateway_rig import VOICE, GatewayRig
from testkit.rigs.gateway_speech import body, events_of
from testkit.rigs.language_model import LanguageModel
from testkit.rigs.realtime import events_until, say
from token2wav_gateway.words.normaliser import Normaliser

TEXT, SPOKEN = "SQL rains. Ada, too.", "sequel rains. Ada, too."
SETTINGS = {
    "voices": {"default": VOICE},
    "text": {"pronunciations": {"SQL": "sequel", "Ada": "Eda"}},
}
KEPT = {"pronunciations": {"Ada": "Ada"}}  # of the client


def said(speaker: LanguageModel) -> list[str]:
    return [request["messages"][0]["content"] for request in speaker.bodies]


@pytest.fixture(autouse=True)
def _forget(speaker: LanguageModel) -> None:
    speaker.bodies.clear()


def test_http(gateway: GatewayRig, speaker: LanguageModel) -> None:
    fields = body(input=TEXT, stream_format="sse", word_timestamps=True, **KEPT)
    with gateway.http() as http:
        answer = http.post("/v1/audio/speech", json=fields)
    *_, words, done = events_of(answer.text.splitlines())
    assert said(speaker) == [SPOKEN]
    assert words["segments"][0]["text"] == SPOKEN
    assert done["usage"]["input_tokens"] == len(TEXT)


def test_the_spoken_text_is_bounded(gateway: GatewayRig) -> None:
    with gateway.http() as http:
        fields = body(input="SQL " * 1000, pronunciations={"SQL": "x" * 100})
        answer = http.post("/v1/audio/speech", json=fields)
    assert answer.status_code == 400
    assert "at most 4096 are allowed" in answer.text


def test_websocket(gateway: GatewayRig, speaker: LanguageModel) -> None:
    with gateway_socket.opened(gateway, **KEPT) as socket:
        socket.send(type="input.text", text=TEXT)
        socket.send(type="input.done")
        socket.until("session.done")
        socket.send(type="cancel", played_ms=60_000)
        cancelled = socket.until("audio.cancelled")
    sentences = ["sequel rains.", "Ada, too."]
    assert said(speaker) == sentences
    assert [event["sentence_text"] for event in socket.of("audio.start")] == sentences
    assert cancelled["heard_text"] == SPOKEN


def test_a_sentence_that_is_cancelled_before_it_begins_has_no_position(
    gateway: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = threading.Event()

    async def change(*_: object) -> None:
        changing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Normaliser, "__call__", change)
    with gateway_socket.opened(gateway) as socket:
        socket.send(type="input.text", text=f"{TEXT} Now.")
        assert changing.wait(PATIENCE_SECONDS)
        socket.send(type="cancel")
        cancelled = socket.until("audio.cancelled")
    assert cancelled["utterance_index"] is cancelled["sentence_index"] is None
    assert not socket.of("audio.start")


def test_realtime(gateway: GatewayRig, speaker: LanguageModel) -> None:
    with realtime.opened(gateway) as connection:
        say(connection, TEXT)
        response: Any = events_until(connection, "response.done")[-1].response
    assert said(speaker) == ["sequel rains.", "Eda, too."]
    assert response.output[0].content[0].transcript == "sequel rains. Eda, too."
    assert response.usage.input_tokens == len(TEXT)


def test_riva(gateway: GatewayRig, speaker: LanguageModel) -> None:
    auth = riva.client.Auth(uri=gateway.riva)
    service = riva.client.SpeechSynthesisService(auth)
    first = next(iter(service.synthesize_online(TEXT, VOICE, sample_rate_hz=24_000)))
    auth.channel.close()
    assert said(speaker) == ["sequel rains. Eda, too."]
    assert first.meta.text == TEXT
    assert first.meta.processed_text == "sequel rains. Eda, too."
