"""Connections of the gateway, with real sockets: slow, ambiguous, half-closed and many requests."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from fastapi import FastAPI
from websockets.frames import CloseCode
from websockets.sync.client import connect

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import serving, serving_gateway
from testkit.rigs.raw_client import (
    SOCKET_PATH,
    answer,
    begin_post,
    begin_websocket,
    frame,
    opened,
    until_closed,
)
from token2wav_gateway.doors.session import Session
from token2wav_gateway.edge import protocols
from token2wav_gateway.log import quiet_libraries
from token2wav_gateway.settings import Settings

HEALTH = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
HEALTH_ALONE = HEALTH.replace(b"x\r\n", b"x\r\nConnection: close\r\n")
MOST_CONNECTIONS = 256 + 2
FEW = {"limits": {"streams": 1, "sockets": 1}}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving_gateway(Settings.model_validate(FEW)) as port:
        yield port


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (HEALTH.replace(b"\r\n", b"\n"), "request: a line does not end with CR LF"),
        (HEALTH.replace(b"1.1", b"1.9"), "request: HTTP version is not 1.0 or 1.1"),
        (HEALTH.replace(b"Host", b"Ho st"), "request: no valid HTTP/1.1"),
    ],
)
def test_ambiguous_requests_close_the_connection(port: int, request_: bytes, problem: str) -> None:
    content = answer(port, request_ + HEALTH)  # the second request may be hidden from a proxy
    head, _, body = content.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    error = json.loads(body)["error"]
    assert error["message"].startswith(problem)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/nowhere"])
def test_a_body_that_becomes_invalid_is_no_error_of_the_gateway(
    port: int, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first path waits for the body, and the second path does not."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    content = answer(port, head.encode() + b"1\r\nx\r\nno chunk\r\n")
    assert content.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("request_", "more"),
    [
        (b"", b""),
        (b"", b"GET"),
        (b"", HEALTH[:-2]),
        (HEALTH, b""),
        (HEALTH, b"GET / "),
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", b"x"),
    ],
)
def test_connections_without_a_request_are_closed(
    monkeypatch: pytest.MonkeyPatch, request_: bytes, more: bytes
) -> None:
    monkeypatch.setattr(protocols, "HEAD_S", 0.2)
    with serving_gateway(Settings()) as port, opened(port) as connection:
        if request_:
            connection.sendall(request_)
            assert connection.recv(1)
        connection.sendall(more)
        until_closed(connection)


def test_an_open_websocket_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "HEAD_S", 0.05)
    with (
        serving_gateway(Settings()) as port,
        connect(f"ws://127.0.0.1:{port}{SOCKET_PATH}") as client,
    ):
        threading.Event().wait(0.2)
        client.ping().wait(PATIENCE_SECONDS)


def test_half_sent_requests_evict_each_other(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(protocols, "HEAD_S", PATIENCE_SECONDS)
    with ExitStack() as stack:
        connections = [stack.enter_context(opened(port)) for _ in range(MOST_CONNECTIONS + 50)]
        for connection in connections:
            with suppress(ConnectionError):  # evicted already
                connection.sendall(HEALTH[:-2])
        assert b"live" in answer(port, HEALTH_ALONE)
        for connection in connections[:50]:
            until_closed(connection)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_clients_that_send_no_more_are_answered(
    monkeypatch: pytest.MonkeyPatch, version: bytes
) -> None:
    monkeypatch.setattr(protocols, "_PRESENCE_S", 0.05)
    asked, go_on = threading.Event(), threading.Event()
    model = FastAPI()

    @model.get("/models")
    def models() -> dict[str, bool]:
        asked.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return {}

    with serving(model) as model_port:
        url = {"url": f"http://127.0.0.1:{model_port}"}
        settings = {"language_model": url, "speech_server": {"url": "127.0.0.1:9"}}
        with serving_gateway(Settings.model_validate(settings)) as port, opened(port) as connection:
            request = HEALTH.replace(b"live", b"ready").replace(b"1.1", version)
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            assert asked.wait(PATIENCE_SECONDS)
            threading.Event().wait(0.2)
            go_on.set()
            content = until_closed(connection)
    present = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (present in content) == (version == b"1.1")
    final = content.rpartition(present)[2]
    assert final.startswith(b"HTTP/1.1 502 ")
    assert b"speech server" in final


@pytest.mark.parametrize(
    "offer",
    [
        "permessage-deflate; server_max_window_bits=8",
        "permessage-deflate; client_max_window_bits=8; server_max_window_bits=8",
        "permessage-deflate; server_max_window_bits=99",
        "permessage-deflate; client_max_window_bits",
    ],
)
def test_no_offer_of_compression_is_accepted(
    port: int, offer: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(port) as connection:
        head = begin_websocket(connection, f"Sec-WebSocket-Extensions: {offer}\r\n".encode())
    assert head.startswith(b"HTTP/1.1 101 ")
    assert b"extensions" not in head.lower()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("begin", "piece", "end"),
    [
        (begin_post, b"1\r\nx\r\n", b"0\r\n\r\n"),
        (begin_websocket, frame(9), frame(1, b"no JSON")),
        (begin_websocket, frame(10), frame(1, b"no JSON")),
    ],
    ids=["chunks of one byte", "pings", "pongs"],
)
def test_health_is_answered_before_a_flood_is_read(
    begin: Callable[[socket.socket], object], piece: bytes, end: bytes
) -> None:
    """The gateway parses the pieces for a second."""
    with serving_gateway(Settings()) as port, ExitStack() as stack:
        floods = [stack.enter_context(opened(port)) for _ in range(4)]
        for flood in floods:
            begin(flood)
        for flood in floods:
            flood.sendall(piece * 20_000 + end)
        assert b"live" in answer(port, HEALTH_ALONE)
        for flood in floods:
            flood.setblocking(False)
            read = b""
            with suppress(BlockingIOError):
                while content := flood.recv(1 << 20):
                    read += content
            assert b"error" not in read


def test_the_log_has_no_address_of_a_websocket(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Some clients send their key in the address."""
    quiet_libraries()
    caplog.set_level(logging.INFO)
    with connect(f"ws://127.0.0.1:{port}{SOCKET_PATH}?key=secret") as client:
        client.ping().wait(PATIENCE_SECONDS)
    assert "secret" not in caplog.text


def test_messages_of_many_fragments_are_refused(port: int) -> None:
    with opened(port) as connection:
        begin_websocket(connection)
        connection.sendall(frame(1, last=False) + frame(0, last=False) * 2000)
        content = until_closed(connection)
    assert b"message: more than 1024 fragments" in content


def test_few_pongs_to_a_client_that_reads_nothing(port: int) -> None:
    """The pongs would wait in memory, without a bound."""
    pings = 80_000
    with opened(port) as connection:
        begin_websocket(connection)
        connection.sendall(frame(9, bytes(125)) * pings + frame(8))
        pongs = until_closed(connection).count(bytes([0x8A, 125]))
    assert 0 < pongs < pings


def test_a_client_whose_close_is_answered_has_left_its_place(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """Only one socket may be open. A session that speaks takes a moment to end."""

    async def run(session: Session) -> None:
        await session._send_json({"type": "admitted"})
        try:
            await session._receive()
        finally:
            await asyncio.sleep(0.1)

    monkeypatch.setattr(Session, "run", run)
    for _ in range(3):
        with connect(f"ws://127.0.0.1:{port}{SOCKET_PATH}") as client:
            assert json.loads(client.recv(PATIENCE_SECONDS)) == {"type": "admitted"}
        assert client.close_code == CloseCode.NORMAL_CLOSURE


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_gateway_ends_while_the_close_of_a_client_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = threading.Event()

    async def run(session: Session) -> None:
        try:
            await session._receive()
        finally:
            left.set()
            await asyncio.sleep(1.5)  # longer than the gateway waits for its sessions

    monkeypatch.setattr(Session, "run", run)
    with ExitStack() as stack:
        with serving_gateway(Settings()) as port:
            connection = stack.enter_context(opened(port))
            begin_websocket(connection)
            connection.sendall(frame(8))
            assert left.wait(PATIENCE_SECONDS)
        assert until_closed(connection) == bytes([0x88, 0])
