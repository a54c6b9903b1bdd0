"""Attacks on the gateway, from clients and from the language model server: other streams lose no
sample.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.sync.client import connect

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.door_server import DoorServer
from testkit.rigs.gateway_rig import VOICE, GatewayRig, tokens_of
from testkit.rigs.gateway_speech import (
    TEXT,
    assert_same,
    body,
    error_of,
    events_of,
    expected,
)
from testkit.rigs.language_model import LanguageModel
from testkit.rigs.raw_client import (
    REALTIME_PATH,
    SOCKET_PATH,
    begin_websocket,
    frame,
    opened,
    until_closed,
)
from token2wav import Token2Wav
from token2wav_client import ClientVoice
from token2wav_gateway.log import quiet_libraries

SETTINGS = {
    "language_model": {"token_timeout_s": 2},
    "limits": {
        "speech_tokens": 200,
        "seconds": 60,
        "body_bytes": 100_000,
        "upload_bytes": 200_000,
        "streams": 8,
        "sockets": 16,
    },
}


def port_of(gateway: GatewayRig) -> int:
    return int(gateway.url.rpartition(":")[2])


def request_of(content: dict[str, Any]) -> bytes:
    """Request of a text, as bytes."""
    document = json.dumps(content).encode()
    head = (
        "POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(document)}\r\n\r\n"
    )
    return head.encode() + document


@pytest.fixture(autouse=True)
def _other_streams_lose_no_sample(
    rig: DoorServer, gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> Iterator[None]:
    """Speaks a text during every attack, and another one after it."""
    heard: list[bytes] = []
    answered = threading.Event()

    def speak() -> None:
        with gateway.http() as http, http.stream("POST", "/v1/audio/speech", json=body()) as speech:
            answered.set()
            heard.append(speech.read())

    during = threading.Thread(target=speak)
    during.start()
    # An attack that takes every place must not take the place of this text.
    assert answered.wait(PATIENCE_SECONDS)
    yield
    during.join()
    speak()
    for content in heard:
        assert_same(content, expected(model, voice, TEXT))
    until(lambda: gateway.value("speaking") == 0)
    rig.wait_until_empty()


@pytest.mark.parametrize(
    ("attack", "status", "reason"),
    [
        ("endless line", 502, "an event is longer than 1048576 bytes"),
        ("endless event", 502, "an event is longer than 1048576 bytes"),
        ("a bomb", 502, "the answer is compressed: gzip"),
        ("brackets", 502, "an event is no piece of an answer"),
        ("no end", 502, "the answer broke off"),
        ("no tokens", 502, "the answer contains no speech token"),
        ("wrong token", 502, "language model: the answer contains no speech token"),
        ("no json", 502, "an event is no piece of an answer"),
        ("a list", 502, "an event is no piece of an answer"),
        ("an error", 502, "out of memory"),
        ("half a character", 502, "language model: error: half \\ud83d"),
        ("no content", 502, "the answer contains no speech token"),
        ("nulls", 502, "the answer contains no speech token"),
        ("a page", 502, "language model: "),
        ("status 500", 502, "status 500: "),
        ("a redirect", 502, "language model: "),
        ("hang", 504, "language model: no answer in time"),
    ],
)
def test_a_hostile_language_model_fails_its_own_text(
    gateway: GatewayRig,
    attack: str,
    status: int,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with gateway.http() as http:
        error = error_of(http.post("/v1/audio/speech", json=body(input=attack)), status)
    assert reason in error["message"]
    assert len(error["message"]) < 400
    # The log names the server, and quotes nothing that may be the text.
    [line] = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert line.startswith(("a text failed: language model: ", "a text failed: speech server: "))
    assert "out of memory" not in line
    assert "xxx" not in line


def test_endless_tokens_end_in_a_broken_connection(gateway: GatewayRig) -> None:
    """The status was sent with the first audio, so only the connection can tell."""
    with gateway.http() as http:
        try:
            answer = http.post("/v1/audio/speech", json=body(input="endless tokens"))
        except httpx.RemoteProtocolError:
            return
        error_of(answer, 502)  # it failed before its first audio


def test_one_log_line_for_a_failure_after_the_first_audio(
    gateway: GatewayRig, speaker: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_libraries()
    speaker.goes_on.clear()
    text = body(input="breaks off")
    with gateway.http() as http, http.stream("POST", "/v1/audio/speech", json=text) as speech:
        pieces = speech.iter_bytes()
        assert next(pieces)
        speaker.goes_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)
    [line] = [
        record
        for record in caplog.records
        # of the gateway, not of the language model server that breaks off
        if not (record.exc_info and isinstance(record.exc_info[1], ConnectionError))
    ]
    assert line.getMessage().startswith("a text failed: language model: ")
    assert line.exc_info is None


def test_a_failure_after_the_first_event_is_an_event(
    gateway: GatewayRig, speaker: LanguageModel
) -> None:
    speaker.goes_on.clear()
    text = body(input="breaks off", stream_format="sse")
    with gateway.http() as http, http.stream("POST", "/v1/audio/speech", json=text) as speech:
        pieces = speech.iter_bytes()
        content = next(pieces)
        speaker.goes_on.set()
        content += b"".join(pieces)
    [*deltas, failure] = events_of(content.decode().splitlines())
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert failure["type"] == "speech.audio.error"
    assert failure["error"]["type"] == "server_error"
    assert failure["error"]["message"].startswith("language model: ")


def test_bodies_of_100_mb_are_refused_before_they_are_read(gateway: GatewayRig) -> None:
    def pieces() -> Iterator[bytes]:
        yield (b'--x\r\ncontent-disposition: form-data; name="audio_sample"; filename="a"\r\n\r\n')
        for _ in range(100):
            yield b"x" * (1 << 20)

    with gateway.http() as http:
        for path in ("voices", "speech"):
            whole = http.post(f"/v1/audio/{path}", content=b"x" * 300_000)
            assert "body: larger than" in error_of(whole, 413)["message"]
            try:
                streamed = http.post(
                    f"/v1/audio/{path}",
                    content=pieces(),
                    headers={"content-type": "multipart/form-data; boundary=x"},
                )
            except httpx.WriteError:  # the connection was closed while the client still sent
                continue
            error_of(streamed, 413)
        form = http.post(
            "/v1/audio/voices", data={"name": "bob"}, files={"audio_sample": b"x" * 150_000}
        )
        assert "creates no voices" in error_of(form, 400)["message"]


def reset(connection: socket.socket) -> None:
    """Lets a connection end with a reset, after which the gateway reads no more of its bytes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def begin_session(connection: socket.socket) -> None:
    """Opens a WebSocket, and configures it."""
    begin_websocket(connection)
    connection.sendall(CONFIGURATION)


CONFIGURATION = frame(1, json.dumps({"type": "session.config", "voice": VOICE}).encode())


@pytest.mark.parametrize(
    "piece",
    [
        frame(1, b"{"),
        frame(1, b'{"type": "input.done"}'),
        frame(1, b'{"type": "input.text", "text": "Dr. . \xe2\x80\x9c a. "}'),
        CONFIGURATION,
    ],
    ids=["wrong messages", "empty utterances", "texts without an end", "configurations"],
)
def test_floods_of_messages_hold_up_nobody(gateway: GatewayRig, piece: bytes) -> None:
    """tests/gateway/edge/test_protocols.py has floods of bytes below the messages."""
    with ExitStack() as stack:
        floods = [stack.enter_context(opened(port_of(gateway))) for _ in range(4)]
        for flood in floods:
            begin_session(flood)
            flood.sendall(piece * 20_000)
            reset(flood)
        with gateway.http() as http:
            assert http.get("/health/live").status_code == 200
            assert len(http.post("/v1/audio/speech", json=body()).content) > 0


def text_frame(message: dict[str, Any]) -> bytes:
    return frame(1, json.dumps(message).encode())


PARTS = 60 * [{"type": "input_text", "text": "."}]
INPUTS = 60 * [{"type": "message", "role": "user", "content": PARTS}]
SPOKEN = {"type": "realtime", "audio": {"output": {"voice": VOICE}}}
SLOW = CONFIGURATION + text_frame({"type": "input.text", "text": "hang\n"})


@pytest.mark.parametrize(
    ("path", "beginning", "message"),
    [
        (REALTIME_PATH, b"", {"type": "response.create"}),
        (REALTIME_PATH, b"", {"type": "response.create", "response": {"input": INPUTS[:9]}}),
        (REALTIME_PATH, b"", {"type": "session.update", "session": SPOKEN}),
        (SOCKET_PATH, CONFIGURATION, {"type": "session.config", "voice": VOICE}),
        (SOCKET_PATH, SLOW, {"type": "session.close"}),
        (SOCKET_PATH, CONFIGURATION, {"type": "cancel"}),
    ],
    ids=["create", "inputs", "update", "config", "close", "cancel"],
)
def test_storms_of_messages_hold_up_nobody(
    gateway: GatewayRig, path: str, beginning: bytes, message: dict[str, Any]
) -> None:
    """The storms go on, and read their answers, until all other requests are answered."""
    piece, calm = text_frame(message), threading.Event()

    def rage(storm: socket.socket) -> None:
        with suppress(ConnectionError):
            while not calm.is_set():
                storm.sendall(piece)

    def listen(storm: socket.socket) -> None:
        with suppress(ConnectionError):
            while storm.recv(1 << 16):
                pass

    with ExitStack() as stack:
        storms = [stack.enter_context(opened(port_of(gateway))) for _ in range(4)]
        threads = [
            threading.Thread(target=work, args=[storm])
            for storm in storms
            for work in (rage, listen)
        ]
        for storm in storms:
            begin_websocket(storm, path=path)
            storm.sendall(beginning)
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        for storm in storms:
            reset(storm)
            stack.callback(storm.shutdown, socket.SHUT_RDWR)
        stack.callback(calm.set)
        with gateway.http() as http:
            for _ in range(20):
                assert http.get("/health/live").status_code == 200
            assert len(http.post("/v1/audio/speech", json=body()).content) > 0
        assert all(thread.is_alive() for thread in threads)


def test_a_client_that_sends_no_more_gets_all_audio(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice
) -> None:
    with opened(port_of(gateway)) as connection:
        connection.sendall(request_of(body()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        connection.shutdown(socket.SHUT_WR)
        head, _, content = until_closed(connection).partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert_same(content, expected(model, voice, TEXT))


def test_a_client_that_leaves_a_session_leaves_no_traceback(
    gateway: GatewayRig, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tasks of the session notice it: one speaks, the other one refuses messages."""
    quiet_libraries()
    text = text_frame({"type": "input.text", "text": f"{TEXT}. " * 5})
    for pause in (0.0, 0.05, 0.2, 0.5):
        with opened(port_of(gateway)) as connection:
            begin_session(connection)
            connection.sendall(text + frame(1, b"{") * 200)
            time.sleep(pause)
            reset(connection)
    until(lambda: gateway.value("sockets") == 0)
    until(lambda: gateway.value("speaking") <= 1)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_reader_that_does_not_read_holds_up_nobody(gateway: GatewayRig) -> None:
    url = gateway.url.replace("http", "ws") + "/v1/audio/speech/stream"
    with ExitStack() as stack:
        for _ in range(3):
            reader = stack.enter_context(opened(port_of(gateway)))
            reader.sendall(request_of(body()))
            deaf = stack.enter_context(connect(url, max_queue=1, close_timeout=0.1))
            deaf.send(json.dumps({"type": "session.config", "voice": VOICE}))
            deaf.send(json.dumps({"type": "input.text", "text": f"{TEXT}. " * 5}))
        with gateway.http() as http:
            audio = np.frombuffer(http.post("/v1/audio/speech", json=body()).content, np.int16)
        assert len(audio) == 960 * len(tokens_of(TEXT))


def test_names_of_voices_are_no_paths(gateway: GatewayRig) -> None:
    (gateway.voices.parent / "secret.safetensors").write_bytes(b"secret")
    with gateway.http() as http:
        for name in ("../secret", "..", ".", "/etc/passwd", "a/b", "a\x00b", "ä", "%2e%2e"):
            error_of(http.post("/v1/audio/speech", json=body(voice=name)), 404)
        for name in ("..%2Fsecret", "%2e%2e", "a%00b"):
            error_of(http.delete(f"/v1/audio/voices/{name}"), 404)
    assert (gateway.voices.parent / "secret.safetensors").exists()
