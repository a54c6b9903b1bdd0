"""Misdeeds of the clients of a gateway, and of its language model server, with the answers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.soak import crowd
from benchmarks.soak.crowd import AUDIO, BROKEN, NOTHING, broken, listed
from benchmarks.soak.gateway_clients import FAILURES, PACES, Manner, said, voice_id
from benchmarks.soak.gateway_door import SPEECH, Door
from benchmarks.soak.lines import Line
from testkit.rigs.gateway_lines import Http, Socket
from testkit.rigs.gateway_rig import GatewayRig
from testkit.rigs.raw_server import resets

IDLE_S = 5.0  # after which the gateway drops a client that does not read or send
VOICES = "/v1/audio/voices"
RECORDING = ROOT / "examples" / "demo_voice" / "recordings" / "prompt.wav"
_FORMATS = ("pcm", "wav", "flac", "opus", "mp3", "aac")
_LONG_TOKENS, _SMALL_WINDOW = 100, 4096
_HALF_REQUESTS = 200
_HEAD_S = 25.0  # the gateway waits 10 s for the headers of a request
_ABOUT_IDLE_S = (IDLE_S - 3.0, IDLE_S + 3.0)


@dataclass(frozen=True)
class Scene(crowd.Scene):
    """Scene of a misdeed against a gateway."""

    door: Door
    rig: GatewayRig

    def speech(self, **fields: Any) -> bytes:
        """Returns a request for a long line in any format, with other fields."""
        line, audio_format = self.line(_LONG_TOKENS), self.random.choice(_FORMATS)
        body = {"model": "tts-1", "input": self.text(line), "voice": voice_id(line)}
        if self.by_chance(0.3):
            body["stream_format"] = "sse"
        return self.door.post(SPEECH, body | {"response_format": audio_format} | fields)

    def text(self, line: Line) -> str:
        """Returns a text for which the language model says a line at any pace."""
        return f"{line.name}{self.random.choice([*PACES])}"

    def begin_session(self, connection: Any) -> None:
        """Begins a session with one sentence."""
        line = self.line(_LONG_TOKENS)
        config = {"type": "session.config", "voice": voice_id(line), "stream_audio": True}
        for message in (config, {"type": "input.text", "text": f"{self.text(line)}\n"}):
            connection.send(json.dumps(message))

    def upload(self, name: str, recording: bytes) -> bytes:
        """Returns a request that makes a voice of a recording."""
        content = (
            b'--x\r\ncontent-disposition: form-data; name="name"\r\n\r\n%s\r\n'
            b'--x\r\ncontent-disposition: form-data; name="audio_sample"; filename="a"\r\n\r\n'
            b"%s\r\n--x--\r\n" % (name.encode(), recording)
        )
        kind = "multipart/form-data; boundary=x"
        head = self.door.head(f"POST {VOICES}", content_type=kind, content_length=len(content))
        return head + content


Act = crowd.Act[Scene]


def leaves(
    request: Callable[[Scene], bytes],
    *,
    cut: bool = False,
    window: int = 0,
    pieces: int = 0,
    pause_s: tuple[float, float] = (0.0, 1.0),
    may_reset: bool = False,
) -> Act:
    """Returns a misdeed that sends a request and leaves before its answer has ended.

    Args:
        cut: the client sends the request only up to any of its bytes.
        window: as in `Door.connection`.
        pieces: largest number of pieces of the answer that the client reads.
        pause_s: shortest and longest time before the client leaves.
        may_reset: half of the clients leave with a reset.
    """

    def act(scene: Scene) -> str:
        content = request(scene)
        with closing(scene.door.connection(window)) as connection:
            connection.sendall(content[: scene.random.randrange(len(content))] if cut else content)
            for _ in range(scene.random.randint(min(1, pieces), pieces)):
                if not connection.recv(4096):
                    break
            scene.moment(*pause_s)
            if may_reset and scene.by_chance():
                resets(connection)
        return NOTHING

    return act


def leaves_a_session(scene: Scene) -> str:
    with scene.door.socket() as connection:
        scene.begin_session(connection)
        scene.moment()
        connection.socket.shutdown(socket.SHUT_RDWR)
    return NOTHING


def cancels_and_speaks_on(scene: Scene) -> str:
    """Cancels a long line in the voice of another one, which it speaks over the same connection."""
    line, long_line = scene.line(), scene.line(_LONG_TOKENS)
    try:
        client = Socket(scene.rig, scene.door.key, voice=voice_id(line))
        with client:
            client.begin(scene.text(long_line))
            scene.moment()
            client.cancel()
            for _ in range(2):  # the long line may have ended before it was cancelled
                for _ in client.pieces():
                    pass
                if client.cancelled:
                    break
            return said(client, line, Manner("socket")) or AUDIO
    except FAILURES as error:
        return broken(error)


def leaves_a_recording(scene: Scene) -> str:
    name = f"left-{scene.random.randrange(1000)}"
    leaves(lambda _: scene.upload(name, RECORDING.read_bytes()), pause_s=(0.0, 3.0))(scene)
    with closing(scene.door.connection()) as connection:
        connection.sendall(scene.door.head(f"DELETE {VOICES}/{name}", connection="close"))
        return connection.recv(64).decode().partition("\r\n")[0]


def stops_reading_a_session(scene: Scene) -> str:
    with scene.door.socket(max_queue=1) as connection:
        scene.begin_session(connection)
        scene.moment(*_ABOUT_IDLE_S)
    return NOTHING


def says_nothing(scene: Scene) -> str:
    with scene.door.socket() as connection:
        return str(json.loads(connection.recv(timeout=60))["error"]["message"])


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
    half = b"" if scene.by_chance(0.3) else f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\n".encode()
    stranger = replace(scene.door, address=f"127.0.0.{scene.random.randint(2, 250)}")
    with ExitStack() as stack:
        for _ in range(_HALF_REQUESTS):
            try:
                stack.enter_context(closing(connection := stranger.connection())).sendall(half)
            except ConnectionError:  # the gateway closes the oldest of too many connections
                connection.close()
        scene.moment(0.0, 2.0)
    return NOTHING


def attack(name: str) -> Act:
    """Returns a misdeed of the language model server, which a text selects."""

    def act(scene: Scene) -> str:
        client = Http(scene.rig, scene.door.key, voice=voice_id(scene.line()))
        try:
            with client:
                client.say(name)
        except FAILURES as error:
            return broken(error)
        return client.error or AUDIO

    return act


_at_a_byte = leaves(Scene.speech, cut=True)
_before_audio = leaves(Scene.speech, pause_s=(0.0, 0.5), may_reset=True)
_in_the_middle = leaves(Scene.speech, pieces=20, pause_s=(0.0, 0.0), may_reset=True)
_never_reads = leaves(
    lambda scene: scene.speech(response_format="wav"), window=_SMALL_WINDOW, pause_s=_ABOUT_IDLE_S
)
_half_upload = leaves(
    lambda scene: scene.upload("half", RECORDING.read_bytes()), cut=True, pause_s=(0.0, 3.0)
)
_endless_text = leaves(lambda scene: scene.speech(input="endless text"), pause_s=(0.0, 3.0))
_ATTACKS = (
    *("endless line", "endless event", "a bomb", "brackets", "no end", "no tokens", "wrong token"),
    *("no json", "a list", "an error", "half a character", "no content", "nulls", "a page"),
    *("status 500", "a redirect", "hang"),
)
_FAILURE = "language model: |speech server: "

MISDEEDS = listed(
    {
        "leave": {
            "at a byte of the request": (_at_a_byte, NOTHING),
            "before the first audio": (_before_audio, NOTHING),
            "in the middle of the audio": (_in_the_middle, NOTHING),
            "in a session": (leaves_a_session, NOTHING),
            "cancels and speaks on": (cancels_and_speaks_on, AUDIO),
            "after a recording": (leaves_a_recording, "HTTP/1.1 (200|404)"),
        },
        "stall": {
            "stops reading and leaves": (_never_reads, NOTHING),
            "stops reading a session": (stops_reading_a_session, NOTHING),
            "says nothing in a session": (says_nothing, "no message for"),
            "stops an upload": (_half_upload, NOTHING),
            "sends headers slowly": (sends_headers_slowly, "closed"),
            "many half requests": (many_half_requests, NOTHING),
        },
        "language model": {
            "endless text": (_endless_text, NOTHING),
            **{name: (attack(name), _FAILURE) for name in _ATTACKS},
            "endless tokens": (attack("endless tokens"), f"{BROKEN}|{_FAILURE}"),
            "breaks off": (attack("breaks off"), f"{BROKEN}|{_FAILURE}"),
        },
    }
)
