"""Misdeeds of the clients of a gateway, and of its language model server, with the answers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import connect

from benchmarks.environment import ROOT
from benchmarks.soak import crowd
from benchmarks.soak.crowd import AUDIO, BROKEN, NOTHING, broken
from benchmarks.soak.gateway_clients import FAILURES, PACES, Manner, said, voice_id
from benchmarks.soak.lines import Line
from testkit.rigs.gateway_lines import Http, Socket
from testkit.rigs.gateway_rig import GatewayRig
from testkit.rigs.gateway_socket import address
from testkit.rigs.raw_server import resets

IDLE_S = 5.0  # after which the gateway drops a client that does not read or send
VOICES = "/v1/audio/voices"
_SPEECH = "/v1/audio/speech"
RECORDING = ROOT / "examples" / "demo_voice" / "recordings" / "prompt.wav"
_FORMATS = ("pcm", "wav", "flac", "opus", "mp3", "aac")
_LONG_TOKENS, _SMALL_WINDOW = 100, 4096
_HALF_REQUESTS = 200
_PATIENCE_S = 150.0  # longer than the gateway's limit of a text
_HEAD_S = 25.0  # the gateway waits 10 s for the headers of a request
_ABOUT_IDLE_S = (IDLE_S - 3.0, IDLE_S + 3.0)


@dataclass(frozen=True)
class Scene(crowd.Scene):
    """Scene of a misdeed against a gateway, with the key of the client."""

    rig: GatewayRig
    key: str

    @property
    def address(self) -> tuple[str, int]:
        url = urlsplit(self.rig.url)
        return url.hostname or "", url.port or 0

    def connection(self, window: int = 0, source: str = "127.0.0.1") -> socket.socket:
        """Opens a connection.

        Args:
            window: bytes that the operating system receives for the client; 0 for its default.
            source: address of the client on this machine.
        """
        opened = socket.socket()
        opened.settimeout(_PATIENCE_S)
        if window:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        try:
            opened.bind((source, 0))
            opened.connect(self.address)
        except OSError:
            opened.close()
            raise
        return opened

    def head(self, request: str, **headers: object) -> bytes:
        """Returns the head of a request with the key, such as `head("GET /v1/models")`."""
        lines = "".join(f"{name.replace('_', '-')}: {headers[name]}\r\n" for name in headers)
        key = f"authorization: Bearer {self.key}\r\n"
        return f"{request} HTTP/1.1\r\nhost: x\r\n{lines}{key}\r\n".encode()

    def socket(self, **options: Any) -> Any:
        """Opens a WebSocket."""
        return connect(
            address(self.rig),
            additional_headers={"authorization": f"Bearer {self.key}"},
            open_timeout=_PATIENCE_S,
            close_timeout=1,
            **options,
        )

    def speech(self, **fields: Any) -> bytes:
        """Returns a request for a long line in any format, with other fields."""
        line, audio_format = self.line(_LONG_TOKENS), self.random.choice(_FORMATS)
        body = {"model": "tts-1", "input": self.text(line), "voice": voice_id(line)}
        if self.by_chance(0.3):
            body["stream_format"] = "sse"
        content = json.dumps(body | {"response_format": audio_format} | fields).encode()
        kind = "application/json"
        return (
            self.head(f"POST {_SPEECH}", content_type=kind, content_length=len(content)) + content
        )

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
        head = self.head(f"POST {VOICES}", content_type=kind, content_length=len(content))
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
        window: as in `Scene.connection`.
        pieces: largest number of pieces of the answer that the client reads.
        pause_s: shortest and longest time before the client leaves.
        may_reset: half of the clients leave with a reset.
    """

    def act(scene: Scene) -> str:
        content = request(scene)
        with closing(scene.connection(window)) as connection:
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
    with scene.socket() as connection:
        scene.begin_session(connection)
        scene.moment()
        connection.socket.shutdown(socket.SHUT_RDWR)
    return NOTHING


def cancels_and_speaks_on(scene: Scene) -> str:
    """Cancels a long line in the voice of another one, which it speaks over the same connection."""
    line, long_line = scene.line(), scene.line(_LONG_TOKENS)
    try:
        client = Socket(scene.rig, scene.key, voice=voice_id(line))
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
    with closing(scene.connection()) as connection:
        connection.sendall(scene.head(f"DELETE {VOICES}/{name}", connection="close"))
        return connection.recv(64).decode().partition("\r\n")[0]


def stops_reading_a_session(scene: Scene) -> str:
    with scene.socket(max_queue=1) as connection:
        scene.begin_session(connection)
        scene.moment(*_ABOUT_IDLE_S)
    return NOTHING


def says_nothing(scene: Scene) -> str:
    with scene.socket() as connection:
        return str(json.loads(connection.recv(timeout=60))["error"]["message"])


def sends_headers_slowly(scene: Scene) -> str:
    with closing(scene.connection()) as connection:
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
    half = b"" if scene.by_chance(0.3) else f"POST {_SPEECH} HTTP/1.1\r\nhost: x\r\n".encode()
    stranger = f"127.0.0.{scene.random.randint(2, 250)}"
    with ExitStack() as stack:
        for _ in range(_HALF_REQUESTS):
            try:
                stack.enter_context(
                    closing(connection := scene.connection(source=stranger))
                ).sendall(half)
            except ConnectionError:  # the gateway closes the oldest of too many connections
                connection.close()
        scene.moment(0.0, 2.0)
    return NOTHING


def attack(name: str) -> Act:
    """Returns a misdeed of the language model server, which a text selects."""

    def act(scene: Scene) -> str:
        client = Http(scene.rig, scene.key, voice=voice_id(scene.line()))
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

MISDEEDS: crowd.Misdeeds[Scene] = {
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
