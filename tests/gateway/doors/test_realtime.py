"""OpenAI's Realtime interface of the gateway, with the package `openai`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import connect

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs import realtime
from testkit.rigs.gateway_rig import VOICE, GatewayRig, tokens_of
from testkit.rigs.gateway_speech import assert_same, expected
from testkit.rigs.realtime import KEY, SLOW, audio_of, events_until, opened, say
from token2wav import Token2Wav
from token2wav_client import ClientVoice

SETTINGS = realtime.SETTINGS
TEXT = "One two three. Four five!\nSix seven eight nine"
SENTENCES = ["One two three.", "Four five!", "Six seven eight nine"]
OUTPUT: Any = {"format": {"type": "audio/pcm", "rate": 24_000}, "voice": VOICE, "speed": 1.25}


def whole(model: Token2Wav, voice: ClientVoice, sentences: list[str], speed: float = 1.0) -> Any:
    return np.concatenate([expected(model, voice, sentence, speed) for sentence in sentences])


def test_a_response_has_the_events_of_openai(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    with opened(gateway) as connection:
        [created] = events_until(connection, "session.created")
        assert created.session.audio.output.voice == "alloy"
        connection.session.update(
            session={
                "type": "realtime",
                "model": "gpt-realtime",
                "output_modalities": ["audio"],
                "instructions": "slowly",
                "tools": [],
                "audio": {"input": {"turn_detection": None}, "output": OUTPUT},
            }
        )
        [updated] = events_until(connection, "session.updated")
        assert updated.session.audio.output.voice == VOICE
        # An empty name is absent, and so is null.
        absent: Any = {"input": None, "output": {"voice": "", "speed": None}}
        connection.session.update(session={"type": "realtime", "audio": absent})
        [updated] = events_until(connection, "session.updated")
        assert updated.session.audio.output.voice == VOICE
        assert updated.session.audio.output.speed == 1.25
        assert updated.session.instructions == "slowly"
        say(connection, TEXT, metadata={"turn": "1"})
        events = events_until(connection, "response.done")
    kinds = [event.type for event in events]
    deltas = ("response.output_audio.delta", "response.output_audio_transcript.delta")
    assert [kind for kind in kinds if kind not in deltas] == [
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    assert_same(audio_of(events), whole(model, voice, SENTENCES, 1.25))
    transcript = [event.delta for event in events if event.type == deltas[1]]
    assert [part.strip() for part in transcript] == SENTENCES
    assert "".join(transcript) == TEXT
    first_words = kinds.index(deltas[1])
    assert first_words < kinds.index(deltas[0])
    response = events[-1].response
    assert response.status == "completed"
    assert response.metadata == {"turn": "1"}
    assert response.audio.output.voice == VOICE
    assert response.output[0].content[0].transcript == TEXT
    tokens = sum(len(tokens_of(sentence)) for sentence in SENTENCES)
    assert response.usage.output_tokens == tokens
    assert response.usage.input_tokens == len(TEXT)
    assert len({event.event_id for event in events}) == len(events)
    for event in events:
        type(event).model_validate(event.model_dump())  # the package itself does not validate


def test_a_response_outside_the_conversation(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    with opened(gateway) as connection:
        item: Any = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Four five!"}],
        }
        connection.response.create(response={"conversation": "none", "input": [item]})
        events = events_until(connection, "response.done")
        assert "conversation.item.added" not in {event.type for event in events}
        assert events[-1].response.conversation_id is None
        assert_same(audio_of(events), expected(model, voice, "Four five!"))


def test_items_are_spoken_in_their_order(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    def item(name: str, text: str) -> Any:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "role": "user", "id": name, "content": content}

    with opened(gateway) as connection:
        create = connection.conversation.item.create
        create(item=item("last", SENTENCES[2]))
        create(item=item("dropped", "Never spoken."))
        create(item=item("first", SENTENCES[0]), previous_item_id="root")
        create(item=item("second", SENTENCES[1]), previous_item_id="first")
        connection.conversation.item.delete(item_id="dropped")
        connection.response.create()
        events = events_until(connection, "response.done")
    previous = {
        event.item.id: event.previous_item_id
        for event in events
        if event.type == "conversation.item.added" and event.item.role == "user"
    }
    assert previous == {"last": None, "dropped": "last", "first": None, "second": "first"}
    assert_same(audio_of(events), whole(model, voice, SENTENCES))


def test_an_interrupted_item_can_be_truncated(gateway: GatewayRig) -> None:
    with opened(gateway) as connection:
        say(connection, SLOW)
        begun = events_until(connection, "response.output_audio.delta")
        for _ in range(3):
            connection.response.cancel()
        events = [*begun, *events_until(connection, "response.done")]
        response = events[-1].response
        assert response.status == "cancelled"
        assert response.status_details.reason == "client_cancelled"
        assert response.output[0].status == "incomplete"
        assert 0 < len(audio_of(events)) < 2 * 960 * len(tokens_of(SLOW))
        item_id, heard_ms = response.output[0].id, len(audio_of(events)) // 48
        truncate = connection.conversation.item.truncate
        truncate(item_id=item_id, content_index=0, audio_end_ms=heard_ms)
        truncated = events_until(connection, "conversation.item.truncated")[-1]
        assert (truncated.item_id, truncated.audio_end_ms) == (item_id, heard_ms)
        truncate(item_id=item_id, content_index=0, audio_end_ms=heard_ms // 2)
        cut = events_until(connection, "conversation.item.truncated")[-1].transcript
        assert cut == SLOW[: len(cut)]
        assert len(cut) < len(truncated.transcript)
        connection.conversation.item.retrieve(item_id=item_id)
        kept = events_until(connection, "conversation.item.retrieved")[-1].item
        assert kept.content[0].transcript == cut
        truncate(item_id=item_id, content_index=0, audio_end_ms=60_000)
        assert "is after the end" in events_until(connection, "error")[-1].error.message


def test_a_second_response_waits_for_the_first(gateway: GatewayRig) -> None:
    with opened(gateway) as connection:
        say(connection, SLOW)
        events_until(connection, "response.output_audio.delta")
        say(connection, "Four five!")
        error = events_until(connection, "error")[-1].error
        assert "is being spoken" in error.message
        assert error.code == "conversation_already_has_active_response"
        connection.response.cancel()
        events_until(connection, "response.done")
        connection.response.create()  # the item waits
        response = events_until(connection, "response.done")[-1].response
        assert response.output[0].content[0].transcript == "Four five!"


@pytest.mark.parametrize(("key", "kind"), [(KEY, "session.created"), ("wrong", "error")])
def test_a_web_page_sends_its_key_as_a_subprotocol(
    gateway: GatewayRig, key: str, kind: str
) -> None:
    """A browser cannot send other headers, and closes a socket that answers no subprotocol."""
    url = f"{gateway.url.replace('http', 'ws')}/v1/realtime?model=gpt-realtime"
    offered: Any = ["realtime", f"openai-insecure-api-key.{key}"]
    with connect(url, subprotocols=offered, open_timeout=PATIENCE_SECONDS) as socket:
        assert socket.subprotocol == "realtime"
        assert json.loads(socket.recv())["type"] == kind
