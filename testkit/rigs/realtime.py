"""OpenAI's Realtime interface of a gateway under test: its connections and their events."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI
from openai.resources.realtime.realtime import RealtimeConnection

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig, key_settings

KEY = "a-key"
SETTINGS = {
    "voices": {"default": VOICE},
    "limits": {"idle_s": 5.0, "text_characters": 1000},
    "keys": [key_settings("shop", KEY)],
}
SLOW = "slow " * 190  # nearly the longest text
_PATIENT: Any = {"open_timeout": PATIENCE_SECONDS}


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
