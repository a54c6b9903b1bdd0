"""Garbage that clients send to a gateway, and floods of cheap bytes, with the right answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus

from benchmarks.soak.crowd import Misdeed
from benchmarks.soak.gateway.clients import (
    SPEECH,
    STAGE,
    Door,
    Manner,
    ask,
    broken,
    hear,
    listen,
    problem,
)
from benchmarks.soak.gateway.language_model import text_of
from benchmarks.soak.gateway.scene import (
    AUDIO,
    BROKEN,
    FEW_KEY,
    NOTHING,
    VOICES,
    Scene,
    upload,
    whole,
    with_key,
)
from benchmarks.soak.gateway.spoken import Spoken

_PIECES, _STORM = 20_000, 1000  # of a flood
_CALLS, _UNFINISHED_BYTES = 5, 16 << 20  # together more than the gateway allows
# Frames of a WebSocket without content, with a mask of zeros: the mask changes no byte.
_PING, _PONG = b"\x89\x80" + bytes(4), b"\x8a\x80" + bytes(4)
_TEXT, _CONTINUATION = b"\x01\x80" + bytes(4), b"\x00\x80" + bytes(4)


# Requests that another server may read differently. A second request follows each of them.

_HEADS = {
    "length and chunks": "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
    "transfer-encoding: chunked\r\n",
    "two lengths": "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n",
    "folded header": "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length:\r\n 4\r\n",
    "bare line feed": "POST {path} HTTP/1.1\nhost: x\ncontent-length: 4\n",
    "chunks in HTTP/1.0": "POST {path} HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n",
    "unknown version": "POST {path} HTTP/1.2\r\nhost: x\r\ncontent-length: 4\r\n",
    "unknown coding": "POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n",
    "space before the colon": "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length : 4\r\n",
    "many headers": "POST {path} HTTP/1.1\r\nhost: x\r\n" + "a: b\r\n" * 200,
}
_LONG_HEAD = "POST {path} HTTP/1.1\r\nhost: x\r\na: " + "b" * 100_000 + "\r\n"


def smuggles(head: str) -> Callable[[Scene], str]:
    """Returns a misdeed that hides a request behind another one."""

    def act(scene: Scene) -> str:
        second = with_key("GET /v1/models HTTP/1.1\r\nhost: x\r\n", scene.door)
        first = with_key(head.format(path=SPEECH), scene.door)
        return exchange(scene, first + b"0\r\n\r\n" + second)

    return act


def exchange(scene: Scene, request: bytes) -> str:
    """Sends bytes, and reads until the gateway closes the connection.

    Returns:
        The status and the sentence of the only answer, or a description of something else.
    """
    with closing(scene.door.connection()) as connection:
        try:
            connection.sendall(request)
            content = b"".join(iter(lambda: connection.recv(65_536), b""))
        except OSError as error:
            return broken(error)
    head, _, rest = content.partition(b"\r\n\r\n")
    if content.count(b"HTTP/1.1 ") != 1:
        return f"{content.count(b'HTTP/1.1 ')} answers"
    return problem(int(head.split()[1]), rest)


# Bodies and messages.

_BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no text": (SPEECH, {"input": None}, "400 input: "),
    "empty text": (SPEECH, {"input": " "}, "400 input: empty"),
    "long text": (SPEECH, {"input": "a " * 3000}, r"400 input: 6000 characters"),
    "half a character": (SPEECH, {"input": "\ud83d"}, "400 input: must be valid Unicode"),
    "unknown field": (SPEECH, {"tone": 1}, "400 tone: is not a known field"),
    "unknown format": (SPEECH, {"response_format": "m4a"}, "400 response_format: "),
    "another speed": (SPEECH, {"speed": 4}, "400 speed: must be from 0.5 to 2"),
    "unknown model": (SPEECH, {"model": "gpt-5"}, "404 model: "),
    "a path as a voice": (SPEECH, {"voice": "../../etc/passwd"}, "404 voice: "),
    "large body": (SPEECH, {"input": "a" * 3_000_000}, f"413 body: larger than|{BROKEN}"),
    "no codes": (STAGE, {"codes": []}, "400 codes: "),
    "huge code": (STAGE, {"codes": [2**64]}, "400 codes: 18446744073709551616 is outside"),
    "code beyond the vocabulary": (STAGE, {"codes": [6561]}, "400 codes: 6561 "),
    "uneven rows": (STAGE, {"codes": [[1], [1, 2]]}, "400 codes: rows of different lengths"),
    "too many codes": (STAGE, {"codes": [1] * 5000}, "400 codes: 5000 sent"),
    "no voice": (STAGE, {"codes": [1], "voice": None}, "400 voice: missing"),
}
_MESSAGES: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("{", "expected a JSON object"),
    "a binary message": (b"\x00", "expected a JSON object"),
    "brackets": ("[" * 100_000, "expected a JSON object"),
    "unknown type": ('{"type": "input.txt"}', "type: "),
    "many sentences": (
        json.dumps({"type": "input.text", "text": "Boats? " * 300}),
        "more than 256 sentences wait",
    ),
}


def sends_a_body(path: str, fields: dict[str, Any]) -> Callable[[Scene], str]:
    """Returns a misdeed that sends wrong fields."""

    def act(scene: Scene) -> str:
        spoken, manner = scene.pcm()
        body = replace(manner, path=path).body(spoken.line) | fields
        with closing(scene.door.connection()) as connection:
            try:
                connection.sendall(scene.door.request(path, body))
            except OSError as error:
                return broken(error)
            hear(connection, spoken, manner)
        return spoken.failure or AUDIO

    return act


def sends_a_message(message: str | bytes) -> Callable[[Scene], str]:
    """Returns a misdeed that sends a wrong message in a session."""

    def act(scene: Scene) -> str:
        with scene.door.socket() as connection:
            voice = scene.line().voice
            assert voice is not None
            connection.send(json.dumps({"voice": voice.id}))
            connection.send(message)
            connection.send(json.dumps({"type": "session.close"}))
            return _close_of(connection)

    return act


def _close_of(connection: Any) -> str:
    """Reads a session until it is closed, and returns the code and the last error."""
    problem = ""
    try:
        while True:
            event = connection.recv(timeout=60)
            if isinstance(event, str) and "error" in (content := json.loads(event)):
                problem = content["error"]["message"]
    except ConnectionClosed as error:
        close = error.rcvd
        return f"{close.code} {close.reason}{problem}" if close else broken(error)


# Keys and names.


def knocks(path: str, key: str) -> Callable[[Scene], str]:
    """Returns a misdeed that sends another key with a request whose body never ends."""

    def act(scene: Scene) -> str:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n"
        return exchange(scene, with_key(head, replace(scene.door, key=key)))

    return act


def asks_too_often(scene: Scene) -> str:
    spoken, manner = scene.pcm()
    for _ in range(2):
        ask(replace(scene.door, key=FEW_KEY), spoken, manner)
    return spoken.failure or AUDIO


def opens_a_session_with_a_wrong_key(scene: Scene) -> str:
    return _session(replace(scene.door, key="wrong"))


def opens_a_session_from_another_page(scene: Scene) -> str:
    return _session(scene.door, origin="http://evil.example")


def _session(door: Door, **options: Any) -> str:
    try:
        with door.socket(**options) as connection:
            return _close_of(connection)
    except InvalidStatus as error:
        return f"{error.response.status_code}"


def sends_from_another_page(scene: Scene) -> str:
    head = f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\norigin: http://evil.example\r\n"
    return exchange(scene, with_key(f"{head}content-length: 1000\r\n", scene.door))


def deletes(name: str) -> Callable[[Scene], str]:
    """Returns a misdeed that deletes a voice that is not the client's."""

    def act(scene: Scene) -> str:
        voice = scene.line().voice
        assert voice is not None
        head = f"DELETE {VOICES}/{name.format(voice=voice.id)} HTTP/1.1\r\n"
        head += "host: x\r\nconnection: close\r\n"
        return exchange(scene, with_key(head, scene.door))

    return act


def uploads(name: str, recording: bytes) -> Callable[[Scene], str]:
    """Returns a misdeed that sends a wrong recording."""

    def act(scene: Scene) -> str:
        with closing(scene.door.connection()) as connection:
            connection.sendall(upload(scene.door, name, recording))
            spoken, manner = scene.pcm()
            hear(connection, spoken, manner)
        return spoken.failure

    return act


# Floods of cheap bytes.


def chunks_of_one_byte(scene: Scene) -> str:
    spoken, manner = scene.pcm()
    content = b" " * _PIECES + json.dumps(manner.body(spoken.line)).encode()
    head = f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    with closing(scene.door.connection()) as connection:
        head += "transfer-encoding: chunked\r\n"
        connection.sendall(with_key(head, scene.door) + chunks + b"0\r\n\r\n")
        hear(connection, spoken, manner)
    return whole(spoken)


def floods(frame: bytes) -> Callable[[Scene], str]:
    """Returns a misdeed that sends many control frames, and then speaks a line."""

    def act(scene: Scene) -> str:
        spoken, manner = scene.pcm()
        assert spoken.line.voice is not None
        with scene.door.socket() as connection:
            config = {"voice": spoken.line.voice.id, "response_format": "pcm"}
            connection.send(json.dumps(config))
            connection.socket.sendall(frame * _PIECES)
            _converse(connection, spoken, manner)
        return whole(spoken)

    return act


def storm_of_configurations(scene: Scene) -> str:
    spoken, manner = scene.pcm()
    assert spoken.line.voice is not None
    config = {"voice": spoken.line.voice.id, "response_format": "pcm", "type": "session.config"}
    with scene.door.socket() as connection:
        for _ in range(_STORM):
            connection.send(json.dumps(config))
        _converse(connection, spoken, manner)
    return whole(spoken)


def unfinished_messages(scene: Scene) -> str:
    with ExitStack() as stack, suppress(ConnectionError):
        calls = [stack.enter_context(scene.door.unfinished_call()) for _ in range(_CALLS)]
        for call in calls:
            call.send(_UNFINISHED_BYTES)
    return NOTHING


def _converse(connection: Any, spoken: Spoken, manner: Manner) -> None:
    text = {"type": "input.text", "text": text_of(spoken.line, manner.mark)}
    connection.send(json.dumps(text))
    connection.send(json.dumps({"type": "input.done"}))
    try:
        listen(connection, [spoken], manner)
    except (OSError, ConnectionClosed) as error:
        spoken.failure = broken(error)


def empty_fragments(scene: Scene) -> str:
    with scene.door.socket() as connection:
        try:
            connection.socket.sendall(_TEXT + _CONTINUATION * _PIECES)
        except OSError as error:
            return broken(error)
        return _close_of(connection)


GARBAGE: list[Misdeed[Scene]] = [
    *(Misdeed("garbage", name, smuggles(head), "400 ") for name, head in _HEADS.items()),
    # The gateway closes the connection while the client sends, which may reset it.
    Misdeed("garbage", "long header", smuggles(_LONG_HEAD), f"400 |{BROKEN}"),
    *(
        Misdeed("garbage", name, sends_a_body(path, fields), expected)
        for name, (path, fields, expected) in _BODIES.items()
    ),
    *(
        Misdeed(
            "garbage", f"{name} in a session", sends_a_message(message), f"100[08] .*{expected}"
        )
        for name, (message, expected) in _MESSAGES.items()
    ),
    *(
        Misdeed("garbage", f"wrong key for {path}", knocks(path, "wrong"), "401 ")
        for path in (SPEECH, STAGE, VOICES)
    ),
    Misdeed("garbage", "wrong key for a session", opens_a_session_with_a_wrong_key, "1008 "),
    Misdeed("garbage", "page of another host", sends_from_another_page, "403 origin: "),
    Misdeed("garbage", "session of another page", opens_a_session_from_another_page, "403"),
    Misdeed("garbage", "key of few requests", asks_too_often, "429 key few: "),
    Misdeed("garbage", "voice of the operator", deletes("{voice}"), "403 "),
    Misdeed("garbage", "path of another file", deletes("..%2F..%2Fgateway.yaml"), "404 "),
    Misdeed("garbage", "recording of noise", uploads("bob", b"noise" * 1000), "400 audio_sample: "),
    Misdeed("garbage", "name that is a path", uploads("../bob", b"noise"), "400 name: "),
    Misdeed("flood", "chunks of one byte", chunks_of_one_byte, AUDIO),
    Misdeed("flood", "pings", floods(_PING), AUDIO),
    Misdeed("flood", "pongs", floods(_PONG), AUDIO),
    Misdeed("flood", "configurations", storm_of_configurations, AUDIO),
    Misdeed("flood", "unfinished messages of Riva", unfinished_messages, NOTHING),
    Misdeed("flood", "empty fragments", empty_fragments, f"1008 message: more than|{BROKEN}"),
]
