"""Honest clients of a gateway: they speak lines through all of its doors, and check the audio."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import Any

import av
import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from benchmarks.soak.crowd import WrongAnswerError, broken
from benchmarks.soak.gateway_door import SPEECH, STAGE, STREAM, Door
from benchmarks.soak.lines import Line

# Tokens per second of the language model, by the mark at the end of a text.
PACES = {".": 60.0, "!": 400.0, "?": 10_000.0}
_PATIENCE_SECONDS = 150.0  # longer than the gateway's limit of a text
_LONG_SAMPLES = 300_000  # a line with more samples is one sentence of a conversation
_SLOW_WINDOW, _SLOW_PIECE, _SLOW_PAUSE_S = 16_384, 48_000, 0.1


class WrongAudioError(WrongAnswerError):
    """Error for wrong samples. No outage excuses it."""


@dataclass
class Spoken:
    """Answer for a line.

    Attributes:
        audio_format: pcm, wav or flac.
        audio: content of the answer.
        failure: why the audio is not complete; empty if it is complete.
    """

    line: Line
    audio_format: str
    audio: bytearray = field(default_factory=bytearray)
    failure: str = "not spoken"

    def check(self) -> None:
        """Checks the samples. After a failure, samples at the end may be missing.

        Raises:
            WrongAudioError: a sample is wrong, or samples are missing or too many.
        """
        if self.failure and self.audio_format != "pcm":
            return
        if self.audio_format == "pcm":
            samples = np.frombuffer(self.audio[: len(self.audio) // 2 * 2], np.int16)
        else:
            with av.open(io.BytesIO(self.audio)) as file:
                frames = [frame.to_ndarray().ravel() for frame in file.decode(audio=0)]
            samples = np.concatenate(frames)
        if fault := self.line.fault([samples], cut_short=bool(self.failure)):
            raise WrongAudioError(f"'{self.line.name}' as {self.audio_format}: {fault}")


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
    audio_format: str = "pcm"
    events: bool = False
    stream: bool = False
    mark: str = "?"
    slow: bool = False

    @classmethod
    def draw(cls, random: Random) -> Manner:
        return cls(
            path=random.choice([SPEECH, SPEECH, STAGE, STREAM]),
            audio_format=random.choice(["pcm", "wav", "flac"]),
            events=random.random() < 0.3,
            stream=random.random() < 0.5,
            mark=random.choice(list(PACES)),
            slow=random.random() < 0.2,
        )

    def text(self, line: Line) -> str:
        """Returns the text of a sentence for which the language model says a line."""
        return f"{line.name}{self.mark}"

    def body(self, line: Line) -> dict[str, Any]:
        """Returns the body of a request."""
        usual = {"voice": voice_id(line), "response_format": self.audio_format}
        if self.path == STAGE:
            return {**usual, "codes": line.tokens.tolist(), "stream": self.stream}
        events = {"stream_format": "sse"} if self.events else {}
        return {**usual, **events, "model": "tts-1", "input": self.text(line)}

    def configuration(self, line: Line) -> dict[str, Any]:
        """Returns the first message of a session."""
        events = {"events": "json"} if self.events else {}
        usual = {"voice": voice_id(line), "response_format": self.audio_format, **events}
        return {**usual, "stream_audio": self.stream}


def voice_id(line: Line) -> str:
    assert line.voice is not None
    return line.voice.id


def speak(door: Door, lines: list[Line], manner: Manner, random: Random) -> list[Spoken]:
    """Speaks lines through a door of the gateway.

    Args:
        lines: lines that the client may speak; it chooses some of them.
    """
    line = random.choice(lines)
    if manner.path != STREAM:
        spoken = Spoken(line, manner.audio_format)
        try:
            request = door.post(manner.path, manner.body(line))
            with closing(door.connection(_SLOW_WINDOW if manner.slow else 0)) as connection:
                connection.sendall(request)
                hear(connection, spoken, manner)
        except OSError as error:
            spoken.failure = broken(error)
        return [spoken]
    sentences = [line] + [
        candidate
        for candidate in random.choices(lines, k=random.randint(0, 8))
        if candidate.voice is line.voice and len(candidate.audio) < _LONG_SAMPLES
    ]
    conversation = [Spoken(sentence, manner.audio_format) for sentence in sentences]
    try:
        with door.socket() as connection:
            send(connection, **manner.configuration(line))
            count = converse(connection, conversation, manner, random)
            if count != len(conversation):
                raise WrongAnswerError(f"{len(conversation)} sentences were sent, {count} spoken")
    except (OSError, ConnectionClosed, InvalidHandshake) as error:
        for sentence in conversation:
            sentence.failure = sentence.failure and broken(error)
    return conversation


# Answers over HTTP.


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


# Sessions over a WebSocket.


def send(connection: Any, **event: Any) -> None:
    connection.send(json.dumps(event))


def converse(connection: Any, spoken: list[Spoken], manner: Manner, random: Random) -> int:
    """Speaks lines of one voice as sentences of a session, and returns its number of sentences.

    Raises:
        WrongAnswerError: another sentence is spoken.
    """
    text = " ".join(manner.text(sentence.line) for sentence in spoken)
    while text:
        size = random.randint(1, 40)
        send(connection, type="input.text", text=text[:size])
        text = text[size:]
    send(connection, type="input.done")
    index = -1
    while True:
        message = connection.recv(timeout=_PATIENCE_SECONDS)
        if manner.slow:
            time.sleep(_SLOW_PAUSE_S)
        if isinstance(message, bytes):
            spoken[index].audio += message
            continue
        event = json.loads(message)
        match event["type"]:
            case "audio.start":
                index += 1
                if event["sentence_text"] != manner.text(spoken[index].line):
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
