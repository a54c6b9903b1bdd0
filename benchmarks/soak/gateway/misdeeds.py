"""Misdeeds of the clients of a gateway, and of its language model server, with the answers."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from websockets.exceptions import ConnectionClosed

from benchmarks.soak.crowd import Misdeed
from benchmarks.soak.gateway.clients import SPEECH, broken, hear, listen
from benchmarks.soak.gateway.garbage import GARBAGE
from benchmarks.soak.gateway.language_model import PACES, text_of
from benchmarks.soak.gateway.scene import (
    AUDIO,
    BROKEN,
    LONG_TOKENS,
    NOTHING,
    RECORDING,
    VOICES,
    Scene,
    upload,
    whole,
    with_key,
)
from benchmarks.soak.lines import Line

_SMALL_WINDOW = 4096
_HALF_REQUESTS = 200
_HEAD_S = 25.0  # the gateway waits 10 s for the headers of a request


# Clients that leave.


def leaves_at_a_byte(scene: Scene) -> str:
    request = scene.speech()
    with closing(scene.door.connection()) as connection:
        connection.sendall(request[: scene.random.randrange(len(request))])
        scene.moment()
    return NOTHING


def leaves_before_audio(scene: Scene) -> str:
    with closing(scene.door.connection()) as connection:
        connection.sendall(scene.speech())
        scene.moment(0.5)
        if scene.random.random() < 0.5:
            _close_with_reset(connection)
    return NOTHING


def leaves_in_the_middle(scene: Scene) -> str:
    with closing(scene.door.connection()) as connection:
        connection.sendall(scene.speech())
        for _ in range(scene.random.randint(1, 20)):
            if not connection.recv(4096):
                break
        if scene.random.random() < 0.5:
            _close_with_reset(connection)
    return NOTHING


def leaves_a_session(scene: Scene) -> str:
    with scene.door.socket() as connection:
        _begin(scene, connection, scene.line(LONG_TOKENS))
        scene.moment()
        connection.socket.shutdown(socket.SHUT_RDWR)
    return NOTHING


def cancels_and_speaks_on(scene: Scene) -> str:
    line = scene.line(LONG_TOKENS)
    spoken, manner = scene.pcm()
    spoken.line = scene.random.choice(
        [candidate for candidate in scene.lines if candidate.voice is line.voice]
    )
    try:
        with scene.door.socket() as connection:
            _begin(scene, connection, line)
            scene.moment()
            connection.send(json.dumps({"type": "cancel"}))
            while True:
                message = connection.recv(timeout=60)
                if isinstance(message, str) and json.loads(message)["type"] == "audio.cancelled":
                    break
            text = {"type": "input.text", "text": text_of(spoken.line, manner.mark)}
            connection.send(json.dumps(text))
            connection.send(json.dumps({"type": "input.done"}))
            listen(connection, [spoken], manner)
    except (OSError, ConnectionClosed) as error:
        spoken.failure = broken(error)
    return whole(spoken)


def leaves_a_recording(scene: Scene) -> str:
    name = f"left-{scene.random.randrange(1000)}"
    with closing(scene.door.connection()) as connection:
        connection.sendall(upload(scene.door, name, RECORDING.read_bytes()))
        scene.moment(3.0)
    with closing(scene.door.connection()) as connection:
        head = f"DELETE {VOICES}/{name} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        connection.sendall(with_key(head, scene.door))
        return connection.recv(64).decode().partition("\r\n")[0]


# Clients that stall.


def sends_no_more(scene: Scene) -> str:
    spoken, manner = scene.pcm()
    with closing(scene.door.connection()) as connection:
        connection.sendall(scene.door.request(SPEECH, manner.body(spoken.line)))
        connection.shutdown(socket.SHUT_WR)
        hear(connection, spoken, manner)
    return whole(spoken)


def stops_reading_and_leaves(scene: Scene) -> str:
    with closing(scene.door.connection(_SMALL_WINDOW)) as connection:
        connection.sendall(scene.speech(response_format="wav"))
        time.sleep(scene.idle_s + scene.random.uniform(-3.0, 3.0))
    return NOTHING


def stops_reading_and_reads_on(scene: Scene) -> str:
    spoken, manner = scene.pcm()
    with closing(scene.door.connection(_SMALL_WINDOW)) as connection:
        connection.sendall(scene.door.request(SPEECH, manner.body(spoken.line)))
        scene.moment(scene.idle_s / 2)
        hear(connection, spoken, manner)
    return whole(spoken)


def stops_reading_a_session(scene: Scene) -> str:
    with scene.door.socket(max_queue=1) as connection:
        _begin(scene, connection, scene.line(LONG_TOKENS))
        time.sleep(scene.idle_s + scene.random.uniform(-3.0, 3.0))
    return NOTHING


def says_nothing(scene: Scene) -> str:
    with scene.door.socket() as connection:
        return str(json.loads(connection.recv(timeout=60))["error"]["message"])


def stops_an_upload(scene: Scene) -> str:
    request = upload(scene.door, "half", RECORDING.read_bytes())
    with closing(scene.door.connection()) as connection:
        connection.sendall(request[: scene.random.randrange(len(request))])
        scene.moment(3.0)
    return NOTHING


def sends_headers_slowly(scene: Scene) -> str:
    with closing(scene.door.connection()) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\n")
        connection.settimeout(0.5)
        deadline = time.monotonic() + _HEAD_S
        while time.monotonic() < deadline:
            try:
                connection.sendall(b"a")
                if not connection.recv(1):
                    return "closed"
            except TimeoutError:
                pass
            except OSError:
                return "closed"
    return "still open"


def many_half_requests(scene: Scene) -> str:
    half = b"" if scene.random.random() < 0.3 else b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\n"
    crowd = replace(scene.door, address=f"127.0.0.{scene.random.randint(2, 250)}")
    with ExitStack() as stack:
        for _ in range(_HALF_REQUESTS):
            try:
                stack.enter_context(closing(connection := crowd.connection())).sendall(half)
            except ConnectionError:  # the gateway closes the oldest of too many connections
                connection.close()
        scene.moment(2.0)
    return NOTHING


# A language model server that attacks.


def asks_for(attack: str) -> Callable[[Scene], str]:
    """Returns a misdeed of the language model server, which a text selects."""

    def act(scene: Scene) -> str:
        spoken, manner = scene.pcm()
        body = manner.body(spoken.line) | {"input": attack}
        with closing(scene.door.connection()) as connection:
            connection.sendall(scene.door.request(SPEECH, body))
            hear(connection, spoken, manner)
        return spoken.failure or AUDIO

    return act


def endless_text(scene: Scene) -> str:
    with closing(scene.door.connection()) as connection:
        connection.sendall(scene.speech(input="endless text"))
        scene.moment(3.0)
    return NOTHING


_FAILURE = r"50[24] (language model|speech server): "
_ATTACKS = {
    **dict.fromkeys(
        (
            "endless line",
            "endless event",
            "a bomb",
            "brackets",
            "no end",
            "no tokens",
            "wrong token",
            "no json",
            "a list",
            "an error",
            "half a character",
            "no content",
            "nulls",
            "a page",
            "status 500",
            "a redirect",
            "hang",
        ),
        _FAILURE,
    ),
    **dict.fromkeys(("endless tokens", "breaks off"), f"{BROKEN}|{_FAILURE}"),
}


def _begin(scene: Scene, connection: Any, line: Line) -> None:
    """Begins a session with one sentence."""
    assert line.voice is not None
    mark = scene.random.choice(list(PACES))
    for message in (
        {"voice": line.voice.id, "response_format": "pcm", "stream_audio": True},
        {"type": "input.text", "text": f"{text_of(line, mark)}\n"},
    ):
        connection.send(json.dumps(message))


def _close_with_reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


MISDEEDS: list[Misdeed[Scene]] = [
    Misdeed("leave", "at a byte of the request", leaves_at_a_byte, NOTHING),
    Misdeed("leave", "before the first audio", leaves_before_audio, NOTHING),
    Misdeed("leave", "in the middle of the audio", leaves_in_the_middle, NOTHING),
    Misdeed("leave", "in a session", leaves_a_session, NOTHING),
    Misdeed("leave", "cancels and speaks on", cancels_and_speaks_on, AUDIO),
    Misdeed("leave", "after a recording", leaves_a_recording, "HTTP/1.1 (200|404)"),
    Misdeed("stall", "sends no more after its request", sends_no_more, AUDIO),
    Misdeed("stall", "stops reading and leaves", stops_reading_and_leaves, NOTHING),
    Misdeed("stall", "stops reading and reads on", stops_reading_and_reads_on, AUDIO),
    Misdeed("stall", "stops reading a session", stops_reading_a_session, NOTHING),
    Misdeed("stall", "says nothing in a session", says_nothing, "no message for"),
    Misdeed("stall", "stops an upload", stops_an_upload, NOTHING),
    Misdeed("stall", "sends headers slowly", sends_headers_slowly, "closed"),
    Misdeed("stall", "many half requests", many_half_requests, NOTHING),
    Misdeed("language model", "endless text", endless_text, NOTHING),
    *(
        Misdeed("language model", attack, asks_for(attack), expected)
        for attack, expected in _ATTACKS.items()
    ),
    *GARBAGE,
]
