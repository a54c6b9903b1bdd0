"""Garbage that clients send to a gateway, and floods of cheap bytes, with the right answers.

`tests/gateway` and `tests/served` check every refusal alone. Here is an example of each place that
refuses: refusals must harm nobody, and leave nothing behind.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

from websockets.exceptions import ConnectionClosed

from benchmarks.soak.crowd import AUDIO, BROKEN, NOTHING, broken, listed
from benchmarks.soak.gateway_clients import Manner, problem, send, voice_id
from benchmarks.soak.gateway_door import SPEECH, STAGE
from benchmarks.soak.gateway_misdeeds import (
    Act,
    Scene,
    asks,
    plain_request,
    request_with,
    speaks_after,
)
from benchmarks.soak.lines import Line

FEW_KEY = "key-of-few-requests"
_PIECES, _STORM = 20_000, 1000  # of a flood
_CALLS, _UNFINISHED_BYTES = 5, 16 << 20  # together more than the gateway allows
# Heads of requests. A second request follows each head, and may be answered by another server.
_POST = f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\n"
_TWO_LENGTHS = f"{_POST}content-length: 4\r\ntransfer-encoding: chunked\r\n"
_LONG_HEAD = f"{_POST}a: {'b' * 100_000}\r\n"
_MANY_SENTENCES = json.dumps({"type": "input.text", "text": "Boats? " * 300})


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


def has_a_wrong_key(scene: Scene) -> str:
    stranger = replace(scene.door, key="wrong")
    return exchange(scene, stranger.head(f"POST {SPEECH}", content_length=1000))


def sends(message: str) -> Act:
    """Returns a misdeed that sends a wrong message in a session.

    The answer is the close code with the last error.
    """

    def act(scene: Scene) -> str:
        error = ""
        with scene.door.socket() as connection:
            send(connection, voice=voice_id(scene.line()))
            connection.send(message)
            send(connection, type="session.close")
            try:
                while True:
                    event = connection.recv(timeout=60)
                    if isinstance(event, str) and (content := json.loads(event))["type"] == "error":
                        error = content["error"]["message"]
            except ConnectionClosed as closed:
                close = closed.rcvd
                return f"{close.code} {close.reason}{error}" if close else broken(closed)

    return act


def asks_too_often(scene: Scene) -> str:
    poor = replace(scene, door=replace(scene.door, key=FEW_KEY))
    asks(plain_request)(poor)
    return asks(plain_request)(poor)


def in_chunks_of_one_byte(scene: Scene, line: Line, manner: Manner) -> bytes:
    content = b" " * _PIECES + json.dumps(manner.body(line)).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    kind = "application/json"
    head = scene.door.head(f"POST {SPEECH}", content_type=kind, transfer_encoding="chunked")
    return head + chunks + b"0\r\n\r\n"


def configures(scene: Scene, connection: Any, line: Line, manner: Manner) -> None:
    for _ in range(_STORM):
        send(connection, type="session.config", **manner.configuration(line))


def unfinished_messages(scene: Scene) -> str:
    with ExitStack() as stack, suppress(ConnectionError):
        calls = [stack.enter_context(scene.door.unfinished_call()) for _ in range(_CALLS)]
        for call in calls:
            call.send(_UNFINISHED_BYTES)
    return NOTHING


_large_body = asks(request_with(SPEECH, input="a" * 3_000_000))
_path_as_voice = asks(request_with(SPEECH, voice="../../etc/passwd"))
_many_codes = asks(request_with(STAGE, codes=[1] * 5000))
_noise = asks(lambda scene, line, manner: scene.upload("bob", b"noise" * 1000))
GARBAGE = listed(
    {
        "garbage": {
            "length and chunks": (smuggles(_TWO_LENGTHS), "400 "),
            # The gateway closes the connection while the client sends, which may reset it.
            "long header": (smuggles(_LONG_HEAD), f"400 |{BROKEN}"),
            "large body": (_large_body, f"413 body: larger than|{BROKEN}"),
            "a path as a voice": (_path_as_voice, "404 voice: "),
            "too many codes": (_many_codes, "400 codes: 5000 sent"),
            "brackets in a session": (sends("[" * 100_000), "100[08] .*expected a JSON object"),
            "many sentences": (sends(_MANY_SENTENCES), "100[08] .*more than 256 sentences wait"),
            "wrong key": (has_a_wrong_key, "401 "),
            "key of few requests": (asks_too_often, "429 key few: "),
            "recording of noise": (_noise, "400 audio_sample: "),
        },
        "flood": {
            "chunks of one byte": (asks(in_chunks_of_one_byte, compared=True), AUDIO),
            "configurations": (speaks_after(configures), AUDIO),
            "unfinished messages of Riva": (unfinished_messages, NOTHING),
        },
    }
)
