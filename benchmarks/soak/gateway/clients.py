"""Honest clients of a gateway, which speak lines through all of its doors."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect

from benchmarks.soak.crowd import WrongAnswerError
from benchmarks.soak.gateway.language_model import PACES, text_of
from benchmarks.soak.gateway.spoken import Spoken
from benchmarks.soak.lines import Line
from testkit.rigs.raw_grpc import UnfinishedCall

SPEECH, STAGE, STREAM = "/v1/audio/speech", "/v1/stage/run", "/v1/audio/speech/stream"
PATIENCE_SECONDS = 150.0  # longer than the gateway's limit of a text
_RIVA_METHOD = "/nvidia.riva.tts.RivaSpeechSynthesis/Synthesize"
_FORMATS = ("pcm", "wav", "flac")
_LONG_SAMPLES = 300_000  # a line with more samples is one sentence of a conversation
_SLOW_WINDOW, _SLOW_PIECE, _SLOW_PAUSE_S = 16_384, 48_000, 0.1


@dataclass(frozen=True)
class Door:
    """Address of a gateway.

    Attributes:
        riva: port of Riva's interface.
        address: address of the client on this machine.
    """

    port: int
    key: str
    riva: int
    address: str = "127.0.0.1"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def connection(self, window: int = 0) -> socket.socket:
        """Opens a connection.

        Args:
            window: bytes that the operating system receives for the client; 0 for its default.
        """
        opened = socket.socket()
        opened.settimeout(PATIENCE_SECONDS)
        if window:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        try:
            opened.bind((self.address, 0))
            opened.connect(("127.0.0.1", self.port))
        except OSError:
            opened.close()
            raise
        return opened

    def request(self, path: str, body: dict[str, Any]) -> bytes:
        """Returns a POST request."""
        content = json.dumps(body).encode()
        headers = {
            "host": "gateway",
            "content-type": "application/json",
            "content-length": str(len(content)),
            **self.headers,
        }
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode() + content

    def unfinished_call(self) -> UnfinishedCall:
        """Opens a call of Riva's interface with the largest message that the gateway takes."""
        return UnfinishedCall(f"127.0.0.1:{self.riva}", _RIVA_METHOD, 17 << 20, self.headers)

    def socket(self, **options: Any) -> Any:
        """Opens a WebSocket."""
        opened = self.connection()
        # The package's thread that reads would wait for a time-out after another thread has closed
        # the connection.
        opened.settimeout(None)
        return connect(
            f"ws://127.0.0.1:{self.port}{STREAM}",
            sock=opened,
            additional_headers=self.headers,
            open_timeout=PATIENCE_SECONDS,
            close_timeout=1,
            **options,
        )


@dataclass(frozen=True)
class Manner:
    """Manner in which an honest client asks for lines.

    Attributes:
        path: door of the gateway.
        audio_format: pcm, wav or flac.
        events: the audio arrives in base64 in events.
        stream: the audio arrives while it is made; elsewhere it always does.
        mark: mark at the end of texts, which selects the pace of the language model.
        slow: the client reads slowly.
    """

    path: str
    audio_format: str
    events: bool
    stream: bool
    mark: str
    slow: bool

    @classmethod
    def draw(cls, random: Random) -> Manner:
        return cls(
            path=random.choice([SPEECH, SPEECH, STAGE, STREAM]),
            audio_format=random.choice(_FORMATS),
            events=random.random() < 0.3,
            stream=random.random() < 0.5,
            mark=random.choice(list(PACES)),
            slow=random.random() < 0.2,
        )

    @classmethod
    def of_each_door(cls) -> list[Manner]:
        return [cls(path, "pcm", False, False, "?", False) for path in (SPEECH, STAGE, STREAM)]

    def body(self, line: Line) -> dict[str, Any]:
        """Body of a request."""
        assert line.voice is not None
        usual = {"voice": line.voice.id, "response_format": self.audio_format}
        if self.path == STAGE:
            return {**usual, "codes": line.tokens.tolist(), "stream": self.stream}
        events = {"stream_format": "sse"} if self.events else {}
        return {**usual, **events, "model": "tts-1", "input": text_of(line, self.mark)}


def speak(door: Door, lines: list[Line], manner: Manner, random: Random) -> list[Spoken]:
    """Speaks lines through a door of the gateway.

    Args:
        lines: lines that the client may speak; it chooses some of them.
    """
    line = random.choice(lines)
    if manner.path == STREAM:
        sentences = [line] + [
            candidate
            for candidate in random.choices(lines, k=random.randint(0, 8))
            if candidate.voice is line.voice and len(candidate.audio) < _LONG_SAMPLES
        ]
        spoken = [Spoken(sentence, manner.audio_format) for sentence in sentences]
        converse(door, spoken, manner, random)
        return spoken
    spoken = [Spoken(line, manner.audio_format)]
    ask(door, spoken[0], manner)
    return spoken


def ask(door: Door, spoken: Spoken, manner: Manner) -> None:
    """Speaks a line over HTTP."""
    try:
        with closing(door.connection(_SLOW_WINDOW if manner.slow else 0)) as connection:
            connection.sendall(door.request(manner.path, manner.body(spoken.line)))
            hear(connection, spoken, manner)
    except OSError as error:
        spoken.failure = broken(error)


def hear(connection: socket.socket, spoken: Spoken, manner: Manner) -> None:
    """Reads the response to a request for a line."""
    try:
        with closing(http.client.HTTPResponse(connection, method="POST")) as response:
            response.begin()
            if response.status != 200:
                spoken.failure = problem(response.status, response.read())
                return
            pieces = _read(response, manner.slow)
            if manner.path == SPEECH and manner.events:
                pieces = _audio_of_events(b"".join(pieces))
            for piece in pieces:
                spoken.audio += piece
    except (OSError, http.client.HTTPException) as error:
        spoken.failure = broken(error)
    else:
        spoken.failure = ""


def problem(status: int, content: bytes) -> str:
    """Returns the status of a response, with the sentence of an error."""
    try:
        return f"{status} {json.loads(content)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{status} {content[:200]!r}"


def broken(error: Exception) -> str:
    """Describes a connection that is refused or broken off."""
    return f"connection: {type(error).__name__} {error}".strip()


def _read(response: http.client.HTTPResponse, slow: bool) -> Iterator[bytes]:
    while piece := response.read1(_SLOW_PIECE):
        yield piece
        if slow:
            time.sleep(_SLOW_PAUSE_S)
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)


def _audio_of_events(content: bytes) -> Iterator[bytes]:
    for line in content.splitlines():
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if event["type"] == "speech.audio.delta":
                yield base64.b64decode(event["audio"])
            elif event["type"] == "speech.audio.error":
                raise http.client.HTTPException(event["error"]["message"])


def converse(door: Door, spoken: list[Spoken], manner: Manner, random: Random) -> None:
    """Speaks lines as sentences over a WebSocket. All lines have one voice."""
    voice = spoken[0].line.voice
    assert voice is not None
    text = " ".join(text_of(sentence.line, manner.mark) for sentence in spoken)
    config: dict[str, Any] = {"voice": voice.id, "response_format": manner.audio_format}
    config["stream_audio"] = manner.stream
    if manner.events:
        config["events"] = "json"
    try:
        with door.socket() as connection:
            connection.send(json.dumps(config))
            while text:
                size = random.randint(1, 40)
                connection.send(json.dumps({"type": "input.text", "text": text[:size]}))
                text = text[size:]
            connection.send(json.dumps({"type": "input.done"}))
            count = listen(connection, spoken, manner)
            if count != len(spoken):
                raise WrongAnswerError(f"{len(spoken)} sentences were sent, {count} spoken")
    except (OSError, ConnectionClosed, InvalidHandshake) as error:
        for sentence in spoken:
            if sentence.failure:
                sentence.failure = broken(error)


def listen(connection: Any, spoken: list[Spoken], manner: Manner) -> int:
    """Reads messages until the end of an utterance, and returns its number of sentences.

    Raises:
        WrongAnswerError: another sentence is spoken.
    """
    index = -1
    while True:
        message = connection.recv(timeout=PATIENCE_SECONDS)
        if manner.slow:
            time.sleep(_SLOW_PAUSE_S)
        if isinstance(message, bytes):
            spoken[index].audio += message
            continue
        event = json.loads(message)
        match event["type"]:
            case "audio.start":
                index += 1
                if event["sentence_text"] != text_of(spoken[index].line, manner.mark):
                    raise WrongAnswerError(f"another sentence is spoken: {event}")
            case "audio.delta":
                spoken[index].audio += base64.b64decode(event["audio"])
            case "error":
                spoken[index].failure = event["error"]["message"]
            case "audio.done":
                if not event["error"]:
                    spoken[index].failure = ""
            case "session.done":
                return int(event["total_sentences"])
