"""OpenAI's Realtime interface of the gateway, with the package `openai`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI, OpenAI
from openai.resources.realtime.realtime import RealtimeConnection
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from examples.speech import language_model
from tests.served.test_gateway import assert_same, expected
from tests.support.gateway_rig import VOICE, GatewayRig, TraceRecorder, serving, tokens_of
from tests.support.patience import PATIENCE_SECONDS, until
from tests.support.server_rig import Rig
from token2wav import Token2Wav
from token2wav_client import ClientVoice

KEY = "a key"
IDLE_S = 2.0
TEXT = "One two three. Four five!\nSix seven eight nine"
SENTENCES = ["One two three.", "Four five!", "Six seven eight nine"]
_PATIENT: Any = {"open_timeout": PATIENCE_SECONDS}
SLOW = "slow " * 190  # nearly the longest text
OUTPUT: Any = {"format": {"type": "audio/pcm", "rate": 24_000}, "voice": VOICE}


@pytest.fixture(scope="module")
def speaker() -> FastAPI:
    return language_model.create_app(tokens_of, 1000.0)


@pytest.fixture(scope="module")
def recorder(speaker: FastAPI) -> TraceRecorder:
    return TraceRecorder(speaker)


@pytest.fixture(scope="module")
def gateway(
    rig: Rig, recorder: TraceRecorder, voice: ClientVoice, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayRig]:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    few = hashlib.sha256(b"few").hexdigest()
    with (
        serving(recorder) as port,
        GatewayRig.start(
            tmp_path_factory.mktemp("gateway"),
            grpc_url=rig.server.grpc_url,
            language_model_url=f"http://127.0.0.1:{port}/v1",
            voice=voice,
            settings={
                "voices": {"default": VOICE},
                "limits": {"idle_s": IDLE_S, "text_characters": 1000, "sockets": 8},
                "keys": [
                    {"name": "shop", "sha256": digest},
                    {"name": "few", "sha256": few, "requests_per_minute": 2},
                ],
            },
        ) as started,
    ):
        yield started


@pytest.fixture(autouse=True)
def _nothing_left(rig: Rig, gateway: GatewayRig) -> Iterator[None]:
    yield
    until(lambda: gateway.value("speaking") == 0 and gateway.value("sockets") == 0)
    rig.wait_until_empty()


@contextmanager
def opened(
    gateway: GatewayRig, key: str = KEY, model: str = "gpt-realtime"
) -> Iterator[RealtimeConnection]:
    with (
        OpenAI(base_url=f"{gateway.url}/v1", api_key=key) as client,
        client.realtime.connect(model=model, websocket_connection_options=_PATIENT) as connection,
    ):
        yield connection


def events_until(connection: RealtimeConnection, kind: str) -> list[Any]:
    """Receives events, the last of which is of a kind."""
    events = [connection.recv()]
    while events[-1].type != kind:
        events.append(connection.recv())
    return events


def say(connection: RealtimeConnection, text: str, **response: Any) -> None:
    content: Any = [{"type": "input_text", "text": text}]
    connection.conversation.item.create(
        item={"type": "message", "role": "user", "content": content}
    )
    options: Any = response
    connection.response.create(response=options)


def audio_of(events: list[Any]) -> bytes:
    return b"".join(
        base64.b64decode(event.delta)
        for event in events
        if event.type == "response.output_audio.delta"
    )


def whole(model: Token2Wav, voice: ClientVoice, sentences: list[str]) -> Any:
    return np.concatenate([expected(model, voice, sentence) for sentence in sentences])


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
    assert_same(audio_of(events), whole(model, voice, SENTENCES))
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


def test_one_connection_speaks_many_responses(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    with opened(gateway) as connection:
        for sentence in SENTENCES:
            say(connection, sentence)
            events = events_until(connection, "response.done")
            assert_same(audio_of(events), expected(model, voice, sentence))
        # A text that is no part of the conversation.
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


def test_an_interruption_stops_the_speech_and_the_next_one_is_heard(
    gateway: GatewayRig, speaker: FastAPI, rig: Rig, model: Token2Wav, voice: ClientVoice
) -> None:
    before, ended = speaker.state.cancelled, rig.ended()["cancelled"]
    with opened(gateway) as connection:
        say(connection, SLOW)
        begun = events_until(connection, "response.output_audio.delta")
        connection.response.cancel()
        events = [*begun, *events_until(connection, "response.done")]
        response = events[-1].response
        assert response.status == "cancelled"
        assert response.status_details.reason == "client_cancelled"
        assert response.output[0].status == "incomplete"
        assert 0 < len(audio_of(events)) < 2 * 960 * len(tokens_of(SLOW))
        until(lambda: speaker.state.cancelled == before + 1)
        until(lambda: rig.ended()["cancelled"] == ended + 1)
        item_id, heard_ms = response.output[0].id, len(audio_of(events)) // 48
        truncate = connection.conversation.item.truncate
        truncate(item_id=item_id, content_index=0, audio_end_ms=heard_ms)
        truncated = events_until(connection, "conversation.item.truncated")[-1]
        assert (truncated.item_id, truncated.audio_end_ms) == (item_id, heard_ms)
        truncate(item_id=item_id, content_index=0, audio_end_ms=60_000)
        assert "is after the end" in events_until(connection, "error")[-1].error.message
        say(connection, "Four five!")
        events = events_until(connection, "response.done")
        assert events[-1].response.status == "completed"
        assert_same(audio_of(events), expected(model, voice, "Four five!"))


def test_the_asyncio_client_hears_the_same(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    async def speech() -> bytes:
        audio = b""
        async with (
            AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY) as client,
            client.realtime.connect(model="token2wav") as connection,
        ):
            content: Any = [{"type": "input_text", "text": "Four five!"}]
            await connection.conversation.item.create(
                item={"type": "message", "role": "user", "content": content}
            )
            await connection.response.create()
            async for event in connection:
                if event.type == "response.output_audio.delta":
                    audio += base64.b64decode(event.delta)
                elif event.type == "response.done":
                    break
        return audio

    assert_same(asyncio.run(speech()), expected(model, voice, "Four five!"))


def test_the_trace_of_a_session_reaches_the_language_model(
    gateway: GatewayRig, recorder: TraceRecorder
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    with (
        OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY) as client,
        client.realtime.connect(model="token2wav", extra_headers=headers) as connection,
    ):
        say(connection, "Four five!")
        events_until(connection, "response.done")
    assert recorder.traces[-1].startswith(f"00-{trace}-")


def test_a_text_that_fails_fails_its_response_alone(gateway: GatewayRig) -> None:
    with opened(gateway) as connection:
        say(connection, "nothing")
        response = events_until(connection, "response.done")[-1].response
        assert response.status == "failed"
        assert "language model: status 400" in response.status_details.error.message
        say(connection, "Four five!")
        assert events_until(connection, "response.done")[-1].response.status == "completed"


ITEM: dict[str, Any] = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "It rains."}],
}


def created(**fields: Any) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": ITEM | fields}


def updated(**fields: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "realtime"} | fields}


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "needs a model that listens"),
        ({"type": "input_audio_buffer.commit"}, "needs a model that listens"),
        (
            created(content=[{"type": "input_audio", "audio": "AAAA"}]),
            "item.content: input_audio needs a model that listens",
        ),
        (created(role="system"), "item.role: a system message needs a model that answers"),
        (
            {"type": "conversation.item.create", "item": {"type": "function_call_output"}},
            "item.type: Input should be 'message'",
        ),
        (created(content=[]), "item.content: List should have at least 1 item"),
        (created(content=[0] * 300_000), "item.content: List should have at most 64 items"),
        (created(id="x" * 65), "item.id: String should match pattern"),
        (created(id=""), "item.id: String should match pattern"),
        (
            created(content=[{"type": "input_text", "text": "x" * 1001}]),
            "item.content: 1001 characters wait to be spoken; at most 1000 are allowed",
        ),
        (
            created() | {"previous_item_id": "none-such"},
            "item_id: there is no item 'none-such'",
        ),
        (
            updated(audio={"input": {"turn_detection": {"type": "server_vad"}}}),
            "session.audio.input.turn_detection: not supported, because this gateway speaks texts",
        ),
        (updated(tools=[{"type": "function"}]), "session.tools: not supported"),
        (updated(output_modalities=["text"]), "session.output_modalities: Input should be 'audio'"),
        (updated(type="transcription"), "session.type: Input should be 'realtime'"),
        (updated(audio={"output": {"voice": "nobody"}}), "voice: 'nobody' is not one of: anna"),
        (updated(audio={"output": {"voice": {"id": "../x"}}}), "voice: '../x' is not one of: anna"),
        (updated(audio={"output": {"speed": 2}}), "session.audio.output.speed: must be 1"),
        (
            updated(audio={"output": {"format": {"type": "audio/pcmu"}}}),
            "session.audio.output.format.type: Input should be 'audio/pcm'",
        ),
        (
            updated(audio={"output": {"format": {"type": "audio/pcm", "rate": 16_000}}}),
            "session.audio.output.format.rate: Input should be 24000",
        ),
        (updated(model="gpt-5"), "model: 'gpt-5' is not one of: token2wav"),
        (updated(instructions="x" * 1001), "session.instructions: 1001 characters; at most 1000"),
        (updated(temperature=1), "session: 'temperature' is not a known field"),
        (updated(**{f"a{n}": 0 for n in range(50_000)}), "session: 'a0' is not a known field"),
        ({"type": "response.create"}, "response.create: no text waits to be spoken"),
        (
            {"type": "response.create", "response": {"input": [ITEM] * 65}},
            "response.input: List should have at most 64 items",
        ),
        (
            {
                "type": "response.create",
                "response": {"input": [], "metadata": {str(n): "" for n in range(50_000)}},
            },
            "response.metadata: 50000 names; at most 16 are allowed",
        ),
        ({"type": "response.cancel"}, "response.cancel: this response is not being spoken"),
        (
            {
                "type": "conversation.item.truncate",
                "item_id": "x",
                "content_index": 0,
                "audio_end_ms": 0,
            },
            "item_id: there is no item 'x'",
        ),
        ({"type": "conversation.item.delete", "item_id": "x"}, "item_id: there is no item 'x'"),
        ({"type": "response.pause"}, "type: 'response.pause' is not one of session.update, "),
        ({"type": ["a"]}, "is not one of session.update"),
        ({"type": "response.cancel", "event_id": 1}, "event_id: Input should be a valid string"),
        ({"type": "x", "event_id": "\ud83d"}, "type: 'x' is not one of session.update"),
        ({"type": "\ud83d", "event_id": "x" * 65}, "type: '\\ud83d' is not one of"),
        ([1], "event: must be a JSON object"),
    ],
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


def test_a_second_response_waits_for_the_first(gateway: GatewayRig) -> None:
    with opened(gateway) as connection:
        say(connection, SLOW)
        events_until(connection, "response.output_audio.delta")
        say(connection, "Four five!")
        assert "is being spoken" in events_until(connection, "error")[-1].error.message
        connection.response.cancel()
        events_until(connection, "response.done")
        connection.response.create()  # the item waits
        response = events_until(connection, "response.done")[-1].response
        assert response.output[0].content[0].transcript == "Four five!"


def test_the_conversation_is_bounded(gateway: GatewayRig) -> None:
    with opened(gateway) as connection:
        connection.recv()
        for number in range(257):
            message = created(content=[{"type": "input_text", "text": "a"}], id=str(number))
            connection.send_raw(json.dumps(message))
            connection.recv()
            if number < 256:
                connection.recv()
            # The reader checks every event, so it never waits for us.
        connection.send_raw(json.dumps(created(id="more")))
        error = events_until(connection, "error")[-1].error
        assert error.message == "item: 256 items wait to be spoken"


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_wrong_key_is_refused(gateway: GatewayRig, key: str) -> None:
    with opened(gateway, key or "none") as connection:
        error = events_until(connection, "error")[-1].error
        assert error.message == "authorization: a valid key is needed, as 'Bearer KEY'"
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008


def test_each_sentence_is_a_request_of_the_key(gateway: GatewayRig) -> None:
    with opened(gateway, "few") as connection:
        say(connection, "One two. Three four.")
        response = events_until(connection, "response.done")[-1].response
    assert response.status == "failed"
    assert response.status_details.error.message == "key few: 2 requests a minute are allowed"


def test_an_unknown_model_is_refused(gateway: GatewayRig) -> None:
    with opened(gateway, model="whisper") as connection:
        assert "'whisper' is not one of" in events_until(connection, "error")[-1].error.message


def test_an_idle_session_ends(gateway: GatewayRig) -> None:
    with opened(gateway) as connection:
        assert "no message for 2 s" in events_until(connection, "error")[-1].error.message


def test_a_client_that_disconnects_cancels_its_speech(
    gateway: GatewayRig, speaker: FastAPI
) -> None:
    before = speaker.state.cancelled
    with opened(gateway) as connection:
        say(connection, SLOW)
        events_until(connection, "response.output_audio.delta")
    until(lambda: speaker.state.cancelled == before + 1)


def test_a_reader_that_does_not_read_is_dropped(gateway: GatewayRig) -> None:
    """It asks for more audio than a connection buffers."""
    url = f"{gateway.url.replace('http', 'ws')}/v1/realtime"
    headers = {"authorization": f"Bearer {KEY}"}
    with connect(url, additional_headers=headers, max_queue=1, close_timeout=0.1) as deaf:
        deaf.recv()
        with suppress(ConnectionClosed):  # it may be dropped before it has sent everything
            for _ in range(40):
                deaf.send(json.dumps(created(content=[{"type": "input_text", "text": SLOW}])))
                deaf.send(json.dumps({"type": "response.create"}))
                deaf.send(json.dumps({"type": "input_audio_buffer.append", "audio": "x" * 500_000}))
        until(lambda: gateway.value("sockets") == 0)


def test_sockets_above_the_limit_are_refused(gateway: GatewayRig) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(opened(gateway)).recv()
        with opened(gateway) as refused:
            assert "8 sockets are open" in events_until(refused, "error")[-1].error.message


def test_the_gateway_speaks_to_the_end_before_it_ends(
    rig: Rig, speaker: FastAPI, voice: ClientVoice, model: Token2Wav, tmp_path: Any
) -> None:
    with ExitStack() as client:
        with (
            serving(speaker) as port,
            GatewayRig.start(
                tmp_path,
                grpc_url=rig.server.grpc_url,
                language_model_url=f"http://127.0.0.1:{port}/v1",
                voice=voice,
                settings={"voices": {"default": VOICE}},
            ) as started,
        ):
            connection = client.enter_context(opened(started))
            say(connection, TEXT)
            begun = events_until(connection, "response.output_audio.delta")
        events = [*begun, *events_until(connection, "response.done")]
        assert_same(audio_of(events), whole(model, voice, SENTENCES))
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001
