"""WebSockets of a gateway whose servers never answer, or fail: clients that stop reading or
sending, long messages, and the requests of a key.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import WebSocket
from safetensors.numpy import save_file
from starlette.types import Message

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import key_settings
from tests.gateway.voices.test_voices import TENSORS
from token2wav_client import AudioChunk
from token2wav_gateway.app import create_app
from token2wav_gateway.doors import sockets
from token2wav_gateway.doors.realtime import RealtimeSession
from token2wav_gateway.doors.session import Session
from token2wav_gateway.doors.sockets import SessionType
from token2wav_gateway.edge.connections import Connection
from token2wav_gateway.edge.fair_reads import FairReads
from token2wav_gateway.errors import INTERNAL, ModelError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings
from token2wav_gateway.speech.servers import Servers
from token2wav_gateway.speech.turn import Turn


def scope_of(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {
        "type": "websocket",
        "path": "/v1/audio/speech/stream",
        "query_string": b"",
        "headers": list(headers),
        "state": {"connection": Connection(asyncio.Transport(), FairReads())},
    }


class Client:
    """Client of a WebSocket, which sends messages and stops reading after the handshake.

    Attributes:
        asked: number of messages that the gateway has asked for.
    """

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.asked = 0
        self._messages: list[Message] = [
            {"type": "websocket.connect"},
            *({"type": "websocket.receive", "text": json.dumps(message)} for message in messages),
        ]

    async def receive(self) -> Message:
        self.asked += 1
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def send(self, message: Message) -> None:
        if message["type"] != "websocket.accept":
            await asyncio.Event().wait()


class Reader(Client):
    """Client of a WebSocket, which sends messages and reads everything.

    Attributes:
        events: events with the times of the event loop at which they were sent, in seconds.
        code: code with which the gateway has closed the socket; 0 while it is open.
    """

    def __init__(self, *messages: dict[str, Any]) -> None:
        super().__init__(*messages)
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.code = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.send":
            self.events.append((anyio.current_time(), json.loads(message["text"])))
        elif message["type"] == "websocket.close":
            self.code = message["code"]

    @property
    def errors(self) -> list[tuple[float, dict[str, Any]]]:
        return [(at, event) for at, event in self.events if event["type"] == "error"]


def fail_after(seconds: float) -> Callable[..., AsyncGenerator[AudioChunk, None]]:
    """Returns a stand-in for the servers behind a turn that fails after a time."""

    async def speak(*_: object) -> AsyncGenerator[AudioChunk, None]:
        await asyncio.sleep(seconds)
        raise ModelError("language model: gone")
        yield

    return speak


def serve(
    client: Client,
    settings: dict[str, Any],
    headers: Any = (),
    session: SessionType = Session,
) -> None:
    """Serves a client until its socket is closed."""

    async def served() -> None:
        app = create_app(Settings.model_validate(settings), Metrics())
        async with app.router.lifespan_context(app):
            scope = scope_of(*headers)
            socket = WebSocket(scope, client.receive, client.send)
            await asyncio.wait_for(app.state.sockets.serve(socket, session), PATIENCE_SECONDS)

    asyncio.run(served())


def test_a_client_that_stops_reading_is_left() -> None:
    client = Client({"voice": "anna"}, {"type": "input.text", "text": "It rains. It"})
    serve(client, {"limits": {"idle_s": 0.1}})


def test_clients_that_do_not_read_do_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway waits for all of them at the same time."""
    monkeypatch.setattr(sockets, "CLOSE_S", 0.2)
    count = 20

    async def seconds() -> float:
        app = create_app(Settings(), Metrics())
        async with app.router.lifespan_context(app):
            serving = [
                asyncio.create_task(
                    app.state.sockets.serve(
                        WebSocket(scope_of(), client.receive, client.send), Session
                    )
                )
                for client in [Client() for _ in range(count)]
            ]
            while app.state.sockets.count < count:
                await asyncio.sleep(0)
            begun = anyio.current_time()
            await app.state.sockets.close()
            ended = anyio.current_time()
            for task in serving:
                task.cancel()
            await asyncio.wait(serving)
        return ended - begun

    assert asyncio.run(seconds()) < count * 0.2 / 2


@pytest.mark.parametrize("end", [".\n", ""])  # words without an end are spoken after text_wait_s
def test_the_idle_clock_starts_when_the_last_sentence_has_ended(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(TENSORS, tmp_path / "anna.safetensors")
    client = Reader({"voice": "anna"}, {"type": "input.text", "text": f"It rains.\nIt snows{end}"})
    idle_s = 0.4
    monkeypatch.setattr(Turn, "_speak", fail_after(1.25 * idle_s))
    limits = {"idle_s": idle_s, "text_wait_s": 0.05}
    serve(client, {"voices": {"folder": tmp_path}, "limits": limits})
    (_, first), (ended, second), (closed, idle) = client.errors
    assert (first["sentence_index"], second["sentence_index"]) == (0, 1)
    assert idle["error"]["message"] == "socket: no message for 0.4 s"
    assert closed - ended >= idle_s


def test_the_announced_sentence_is_spoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text makes room for it, while a client that reads slowly gets the announcement."""
    save_file(TENSORS, tmp_path / "anna.safetensors")
    text = {"type": "input.text", "text": "It rains.\n"}
    client, spoken = Reader({"voice": "anna"}, text, {"type": "session.close"}), list[str]()

    async def speak(turn: Turn) -> AsyncGenerator[AudioChunk, None]:
        spoken.append(await turn.spoken_text())
        raise ModelError("language model: gone")
        yield

    monkeypatch.setattr(Servers, "full", property(lambda _: not client.events))
    monkeypatch.setattr(Turn, "_speak", speak)
    changes = {"pronunciations": {"rains": "pours"}}
    serve(client, {"voices": {"folder": tmp_path}, "text": changes})
    (_, start), *_ = client.events
    assert spoken == [start["sentence_text"]]


def test_further_configurations_count_as_requests_of_a_key(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "anna.safetensors")
    config = {"type": "session.config", "voice": "anna"}
    client = Reader(config, config, config, {"type": "session.close"})
    keys = [key_settings("shop", "secret", requests_per_minute=2)]
    headers = [(b"authorization", b"Bearer secret")]
    serve(client, {"voices": {"folder": tmp_path}, "keys": keys}, headers)
    [(_, error)] = client.errors
    assert error["message"] == "key shop: 2 requests a minute are allowed"
    assert error["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("session", [Session, RealtimeSession])
def test_a_session_without_a_message_ends_with_the_gateway(session: SessionType) -> None:
    client = Reader()

    async def served() -> None:
        app = create_app(Settings.model_validate({"limits": {"idle_s": 5}}), Metrics())
        async with app.router.lifespan_context(app):
            socket = WebSocket(scope_of(), client.receive, client.send)
            serving = asyncio.create_task(app.state.sockets.serve(socket, session))
            while client.asked < 2:  # the handshake, and the first message
                await asyncio.sleep(0)
            app.state.sockets.drain()
            await serving

    asyncio.run(served())
    assert client.code == 1001


class Panic(BaseException):
    """Panic of a library in Rust."""


@pytest.mark.parametrize("session", [Session, RealtimeSession])
@pytest.mark.parametrize("failure", [ValueError, Panic])
def test_a_session_that_fails_ends_with_an_error(
    failure: type[BaseException],
    session: SessionType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object) -> None:
        raise failure("words of the client")

    save_file(TENSORS, tmp_path / "anna.safetensors")
    monkeypatch.setattr(session, "_take", fail)
    client = Reader({"voice": "anna"}, {"type": "input.done"})
    with pytest.raises(failure):  # for the log
        serve(client, {"voices": {"folder": tmp_path}}, session=session)
    [(_, error)] = client.errors
    assert (error["error"]["message"], client.code) == (INTERNAL, 1011)


def test_a_long_message_does_not_hold_up_other_clients(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "anna.safetensors")
    length = 50_000

    async def serve() -> int:
        settings = {"voices": {"folder": tmp_path}, "limits": {"idle_s": 0.1}}
        app = create_app(Settings.model_validate(settings), Metrics())
        client = Client({"voice": "anna"}, {"type": "input.text", "text": ". " * (length // 2)})
        turns = 0
        async with app.router.lifespan_context(app):
            socket = WebSocket(scope_of(), client.receive, client.send)
            serving = asyncio.create_task(app.state.sockets.serve(socket, Session))
            while not serving.done():
                await asyncio.sleep(0)
                turns += client.asked == 3  # the gateway works on the long text
        return turns

    assert asyncio.run(serve()) > length // 10_000
