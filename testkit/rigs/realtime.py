"""OpenAI's Realtime interface of a gateway under test: its connections and their events."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.resources.realtime.realtime import RealtimeConnection

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig, serving
from testkit.rigs.server_rig import Rig
from token2wav_client import ClientVoice

KEY, FEW_KEY = "a key", "few"  # the second key is allowed 2 requests a minute
IDLE_S, SOCKETS = 5.0, 8  # all sockets are opened before the first is idle, also on a busy machine
SLOW = "slow " * 190  # nearly the longest text
_PATIENT: Any = {"open_timeout": PATIENCE_SECONDS}


@contextmanager
def realtime_gateway(
    folder: Path, rig: Rig, language_model: Any, voice: ClientVoice
) -> Iterator[GatewayRig]:
    """Starts a gateway with keys and small limits.

    Args:
        language_model: ASGI application.
    """
    key, few_key = (hashlib.sha256(key.encode()).hexdigest() for key in (KEY, FEW_KEY))
    with (
        serving(language_model) as port,
        GatewayRig.start(
            folder,
            grpc_url=rig.server.grpc_url,
            language_model_url=f"http://127.0.0.1:{port}/v1",
            voice=voice,
            settings={
                "voices": {"default": VOICE},
                "limits": {"idle_s": IDLE_S, "text_characters": 1000, "sockets": SOCKETS},
                "keys": [
                    {"name": "shop", "sha256": key},
                    {"name": "few", "sha256": few_key, "requests_per_minute": 2},
                ],
            },
        ) as started,
    ):
        yield started


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
