"""Garbage that clients send to a gateway, and floods of cheap bytes, with the right answers."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus

from benchmarks.soak.crowd import AUDIO, BROKEN, NOTHING, broken, listed
from benchmarks.soak.gateway_clients import Manner, problem, send, voice_id
from benchmarks.soak.gateway_misdeeds import (
    VOICES,
    Act,
    Scene,
    asks,
    plain_request,
    request_with,
    speaks_after,
)
from benchmarks.soak.lines import Line
from testkit.rigs.gateway_door import SPEECH, STAGE

FEW_KEY = "key-of-few-requests"
_PIECES, _STORM = 20_000, 1000  # of a flood
_CALLS, _UNFINISHED_BYTES = 5, 16 << 20  # together more than the gateway allows
# Frames of a WebSocket without content, with a mask of zeros: the mask changes no byte.
_PING, _PONG = b"\x89\x80" + bytes(4), b"\x8a\x80" + bytes(4)
_TEXT, _CONTINUATION = b"\x01\x80" + bytes(4), b"\x00\x80" + bytes(4)

# Requests that another server may read differently. A second request follows each of them.
_POST = f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\n"
_HEADS = {
    "length and chunks": f"{_POST}content-length: 4\r\ntransfer-encoding: chunked\r\n",
    "two lengths": f"{_POST}content-length: 4\r\ncontent-length: 5\r\n",
    "folded header": f"{_POST}content-length:\r\n 4\r\n",
    "bare line feed": f"POST {SPEECH} HTTP/1.1\nhost: x\ncontent-length: 4\n",
    "chunks in HTTP/1.0": f"{_POST}transfer-encoding: chunked\r\n".replace("1.1", "1.0"),
    "unknown version": f"{_POST}content-length: 4\r\n".replace("1.1", "1.2"),
    "unknown coding": f"{_POST}transfer-encoding: xchunked\r\n",
    "space before the colon": f"{_POST}content-length : 4\r\n",
    "many headers": _POST + "a: b\r\n" * 200,
}
_LONG_HEAD = f"{_POST}a: {'b' * 100_000}\r\n"

# Fields of a body that are wrong: a door, the fields, and the answer.
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
_MANY_SENTENCES = json.dumps({"type": "input.text", "text": "Boats? " * 300})
_MESSAGES: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("{", "expected a JSON object"),
    "a binary message": (b"\x00", "expected a JSON object"),
    "brackets": ("[" * 100_000, "expected a JSON object"),
    "unknown type": ('{"type": "input.txt"}', "type: "),
    "many sentences": (_MANY_SENTENCES, "more than 256 sentences wait"),
}


def exchange(scene: Scene, request: bytes) -> str:
    """Sends bytes, and reads until the gateway closes the connection.

    Returns:
        The status and the sentence of the only answer, or a description of something else.
    """
    with closing(scene.door.connection()) as connection:
        connection.sendall(request)
        content = b"".join(iter(lambda: connection.recv(65_536), b""))
    head, _, rest = content.partition(b"\r\n\r\n")
    if content.count(b"HTTP/1.1 ") != 1:
        return f"{content.count(b'HTTP/1.1 ')} answers"
    return problem(int(head.split()[1]), rest)


def smuggles(head: str) -> Act:
    """Returns a misdeed that hides a request behind another one."""

    def act(scene: Scene) -> str:
        second = scene.door.head("GET /v1/models")
        return exchange(scene, scene.door.with_key(head) + b"0\r\n\r\n" + second)

    return act


def knocks(request: str, key: str = "", **headers: object) -> Act:
    """Returns a misdeed that sends the head of a request, perhaps with another key.

    Args:
        request: method and path. `{voice}` stands for a voice of the operator.
    """

    def act(scene: Scene) -> str:
        door = replace(scene.door, key=key or scene.door.key)
        return exchange(scene, door.head(request.format(voice=voice_id(scene.line())), **headers))

    return act


def opens(message: str | bytes = "", key: str = "", **options: Any) -> Act:
    """Returns a misdeed that opens a session, and perhaps sends a wrong message.

    The answer is the status, or the close code with the last error.
    """

    def act(scene: Scene) -> str:
        door = replace(scene.door, key=key or scene.door.key)
        try:
            with door.socket(**options) as connection:
                if message:
                    send(connection, voice=voice_id(scene.line()))
                    connection.send(message)
                    send(connection, type="session.close")
                return _close_of(connection)
        except InvalidStatus as error:
            return f"{error.response.status_code}"

    return act


def _close_of(connection: Any) -> str:
    """Reads a session until it is closed, and returns the code and the last error."""
    problem = ""
    try:
        while True:
            event = connection.recv(timeout=60)
            if isinstance(event, str) and (content := json.loads(event))["type"] == "error":
                problem = content["error"]["message"]
    except ConnectionClosed as error:
        close = error.rcvd
        return f"{close.code} {close.reason}{problem}" if close else broken(error)


def asks_too_often(scene: Scene) -> str:
    poor = replace(scene, door=replace(scene.door, key=FEW_KEY))
    asks(plain_request)(poor)
    return asks(plain_request)(poor)


def uploads(name: str, recording: bytes) -> Act:
    """Returns a misdeed that sends a wrong recording."""
    return asks(lambda scene, line, manner: scene.upload(name, recording))


def in_chunks_of_one_byte(scene: Scene, line: Line, manner: Manner) -> bytes:
    content = b" " * _PIECES + json.dumps(manner.body(line)).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    kind = "application/json"
    head = scene.door.head(f"POST {SPEECH}", content_type=kind, transfer_encoding="chunked")
    return head + chunks + b"0\r\n\r\n"


def floods(frame: bytes) -> Act:
    """Returns a misdeed that sends many control frames, and then speaks a line."""
    return speaks_after(lambda scene, connection, *_: connection.socket.sendall(frame * _PIECES))


def configures(scene: Scene, connection: Any, line: Line, manner: Manner) -> None:
    for _ in range(_STORM):
        send(connection, type="session.config", **manner.configuration(line))


def unfinished_messages(scene: Scene) -> str:
    with ExitStack() as stack, suppress(ConnectionError):
        calls = [stack.enter_context(scene.door.unfinished_call()) for _ in range(_CALLS)]
        for call in calls:
            call.send(_UNFINISHED_BYTES)
    return NOTHING


def empty_fragments(scene: Scene) -> str:
    with scene.door.socket() as connection:
        connection.socket.sendall(_TEXT + _CONTINUATION * _PIECES)
        return _close_of(connection)


_OTHER_PAGE = "http://evil.example"
_from_another_page = knocks(f"POST {SPEECH}", origin=_OTHER_PAGE, content_length=1000)
_deletes_a_voice = knocks(f"DELETE {VOICES}/{{voice}}", connection="close")
_deletes_a_file = knocks(f"DELETE {VOICES}/..%2F..%2Fgateway.yaml", connection="close")
GARBAGE = listed(
    {
        "garbage": {
            **{name: (smuggles(head), "400 ") for name, head in _HEADS.items()},
            # The gateway closes the connection while the client sends, which may reset it.
            "long header": (smuggles(_LONG_HEAD), f"400 |{BROKEN}"),
            **{
                name: (asks(request_with(path, **fields)), expected)
                for name, (path, fields, expected) in _BODIES.items()
            },
            **{
                f"{name} in a session": (opens(message), f"100[08] .*{expected}")
                for name, (message, expected) in _MESSAGES.items()
            },
            **{
                f"wrong key for {path}": (
                    knocks(f"POST {path}", key="wrong", content_length=1000),
                    "401 ",
                )
                for path in (SPEECH, STAGE, VOICES)
            },
            "wrong key for a session": (opens(key="wrong"), "1008 "),
            "page of another host": (_from_another_page, "403 origin: "),
            "session of another page": (opens(origin=_OTHER_PAGE), "403"),
            "key of few requests": (asks_too_often, "429 key few: "),
            "voice of the operator": (_deletes_a_voice, "403 "),
            "path of another file": (_deletes_a_file, "404 "),
            "recording of noise": (uploads("bob", b"noise" * 1000), "400 audio_sample: "),
            "name that is a path": (uploads("../bob", b"noise"), "400 name: "),
        },
        "flood": {
            "chunks of one byte": (asks(in_chunks_of_one_byte, compared=True), AUDIO),
            "pings": (floods(_PING), AUDIO),
            "pongs": (floods(_PONG), AUDIO),
            "configurations": (speaks_after(configures), AUDIO),
            "unfinished messages of Riva": (unfinished_messages, NOTHING),
            "empty fragments": (empty_fragments, f"1008 message: more than|{BROKEN}"),
        },
    }
)
