"""Realtime events and connections that the gateway refuses: each with a sentence."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import yaml
from pydantic import ValidationError

from testkit.rigs import realtime
from testkit.rigs.gateway_rig import GatewayRig, key_settings
from testkit.rigs.realtime import (
    KEY,
    events_until,
    opened,
    say,
)
from testkit.tables import table
from token2wav_gateway.doors.realtime_events import ItemCreate

FEW_KEYS = ["few", "cheap", "wrong", "empty"]
SETTINGS = realtime.SETTINGS | {
    "keys": [
        key_settings("shop", KEY),
        *(key_settings(name, name, requests_per_minute=2) for name in FEW_KEYS),
    ]
}
ITEM: dict[str, Any] = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "It rains."}],
}


def created(**fields: Any) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": ITEM | fields}


def updated(**fields: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "realtime"} | fields}


def response(**fields: Any) -> dict[str, Any]:
    return {"type": "response.create", "response": fields}


# Fields of an item, of a session or of another event, and the error. LONG has 1001 characters.
WRONG = table(
    r"""
event | {type: input_audio_buffer.append, audio: AAAA} | needs a model that listens
event | {type: input_audio_buffer.commit} | needs a model that listens
event | {type: response.create} | response.create: no text waits to be spoken
event | {type: response.cancel} | Cancellation failed: this response is not being spoken
event | {type: response.cancel, event_id: 1} | event_id: Input should be a valid string
event | {type: conversation.item.delete, item_id: x} | item_id: there is no item 'x'
event | {type: response.pause} | type: 'response.pause' is not one of session.update,
event | {type: [a]} | is not one of session.update
event | {type: x, event_id: "\ud83d"} | type: 'x' is not one of session.update
event | {type: "\ud83d", event_id: LONG} | type: '\ud83d' is not one of
event | [1] | event: must be a JSON object
item | {content: [{type: input_audio}]} | item.content: input_audio needs a model that listens
item | {role: system} | item.role: a system message needs a model that answers
item | {type: function_call_output} | item.type: Input should be 'message'
item | {content: []} | item.content: List should have at least 1 item
item | {id: LONG} | item.id: expected 1 to 64 visible characters of ASCII
item | {id: ""} | item.id: expected 1 to 64 visible characters of ASCII
item | {content: [{type: input_text, text: LONG}]} | item.content: 1001 characters wait to be spok
session | {audio: {input: {turn_detection: {type: server_vad}}}} | turn_detection: not supported
session | {tools: [{type: function}]} | session.tools: not supported
session | {output_modalities: [text]} | session.output_modalities: Input should be 'audio'
session | {type: transcription} | session.type: Input should be 'realtime'
session | {audio: {output: {voice: nobody}}} | voice: 'nobody' is not one of: anna
session | {audio: {output: {voice: {id: ../x}}}} | voice: '../x' is not one of: anna
session | {audio: {output: {speed: 0.25}}} | session.audio.output.speed: must be from 0.5 to 2
session | {audio: {output: {format: {type: audio/opus}}}} | session.audio.output.format.type: Inpu
session | {audio: {output: {format: {rate: 11025}}}} | output.format.rate: 11025 is not one of 8000,
session | {model: gpt-5} | model: 'gpt-5' is not one of: token2wav
session | {instructions: LONG} | session.instructions: 1001 characters; at most 1000
session | {temperature: 1} | session: 'temperature' is not a known field
"""
)
TRUNCATE = {"type": "conversation.item.truncate", "content_index": 0, "audio_end_ms": 0}
NAMES = {str(number): "" for number in range(50_000)}
# Events, and the error.
MANY = [
    (created() | {"previous_item_id": "none-such"}, "item_id: there is no item 'none-such'"),
    (TRUNCATE | {"item_id": "x"}, "item_id: there is no item 'x'"),
    (created(content=[0] * 300_000), "item.content: must be a JSON object"),
    (created(content=ITEM["content"] * 65), "item.content: List should have at most 64 items"),
    (updated(**NAMES), "session: '0' is not a known field"),
    (response(input=[ITEM] * 65), "response.input: List should have at most 64 items"),
    (response(metadata=NAMES), "response.metadata: 50000 names; at most 16 are allowed"),
    (response(metadata={"w" * 900: ""}), "response.metadata: Value should have at most 64 items"),
]


def wrong_event(kind: str, cell: str) -> Any:
    content = yaml.safe_load(cell.replace("LONG", "x" * 1001))
    if kind == "event":
        return content
    return created(**content) if kind == "item" else updated(**content)


@pytest.mark.parametrize(
    ("event", "sentence"),
    [*((wrong_event(kind, cell), sentence) for kind, cell, sentence in WRONG), *MANY],
)
def test_a_wrong_event_gets_a_sentence_and_the_session_goes_on(
    gateway: GatewayRig, event: Any, sentence: str
) -> None:
    with opened(gateway) as connection:
        if isinstance(event, dict):
            event = {"event_id": "seven"} | event
        connection.send_raw(json.dumps(event))
        error = events_until(connection, "error")[-1].error
        assert sentence in error.message
        assert len(error.message) < 300
        if isinstance(event, dict):
            assert error.event_id == (event["event_id"] if event["event_id"] == "seven" else None)
        connection.session.update(session={"type": "realtime"})
        events_until(connection, "session.updated")


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"type": "response.cancel"}, "response_cancel_not_active"),
        (created(id="one"), "item_create_duplicate_item_id"),
        ({"type": "conversation.item.retrieve", "item_id": "x"}, "item_retrieve_invalid_item_id"),
        ({"type": "conversation.item.delete", "item_id": "x"}, None),
    ],
)
def test_errors_that_clients_tell_apart_have_the_codes_of_openai(
    gateway: GatewayRig, event: Any, code: str | None
) -> None:
    """Pipecat ends its session at an error with another code."""
    with opened(gateway) as connection:
        connection.send_raw(json.dumps(created(id="one")))
        connection.send_raw(json.dumps(event))
        assert events_until(connection, "error")[-1].error.code == code


@pytest.mark.parametrize("message", ["{", "[" * 100_000, '{"type": "\\ud83d"}', b"\x00"])
def test_a_message_that_is_no_event_gets_a_sentence(
    gateway: GatewayRig, message: str | bytes
) -> None:
    with opened(gateway) as connection:
        connection.send_raw(message)
        error = events_until(connection, "error")[-1].error
        assert error.type == "invalid_request_error"
        connection.session.update(session={"type": "realtime"})
        events_until(connection, "session.updated")


def test_the_conversation_is_bounded(gateway: GatewayRig) -> None:
    with opened(gateway) as connection:
        connection.recv()
        for number in range(257):
            message = created(
                content=[{"type": "input_text", "text": "." if number else "One"}], id=str(number)
            )
            connection.send_raw(json.dumps(message))
            connection.recv()
            if number < 256:
                connection.recv()
            # The reader checks every event, so it never waits for us.
        connection.send_raw(json.dumps(created(id="more")))
        error = events_until(connection, "error")[-1].error
        assert error.message == "item: 256 items wait to be spoken"
        connection.response.create()
        assert events_until(connection, "conversation.item.deleted")[-1].item_id == "0"


def test_each_sentence_is_a_request_of_the_key(gateway: GatewayRig) -> None:
    with opened(gateway, "few") as connection:
        say(connection, "One two. Three four.")
        response = events_until(connection, "response.done")[-1].response
    assert response.status == "failed"
    assert response.status_details.error.message == "key few: 2 requests a minute are allowed"


@pytest.mark.parametrize(
    ("key", "event", "answer"),
    [
        ("cheap", updated(), "session.updated"),
        ("wrong", updated(voice="anna"), "error"),
        ("empty", {"type": "response.create"}, "error"),
    ],
)
def test_cheap_events_are_requests_of_the_key(
    gateway: GatewayRig, key: str, event: dict[str, Any], answer: str
) -> None:
    """Those that are refused are counted too."""
    with opened(gateway, key) as connection:
        connection.recv()
        for kind in (answer, "error"):
            connection.send(cast(Any, event))
            last = events_until(connection, kind)[-1]
        assert last.error.message == f"key {key}: 2 requests a minute are allowed"


def test_an_unknown_model_is_refused(gateway: GatewayRig) -> None:
    with opened(gateway, model="whisper") as connection:
        assert "'whisper' is not one of" in events_until(connection, "error")[-1].error.message


def test_few_mistakes_are_reported_for_any_number_of_wrong_parts() -> None:
    flood = {f"field{index}": 1 for index in range(100)}
    item = {"type": "message", "role": "user", "content": [flood] * 64}
    with pytest.raises(ValidationError) as caught:
        ItemCreate.model_validate({"type": "conversation.item.create", "item": item})
    assert caught.value.error_count() == 3  # type and text are missing too
