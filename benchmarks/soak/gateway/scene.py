"""Scene of the misdeeds against a gateway: its address, the lines of the client, and requests."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.soak.gateway.clients import SPEECH, Door, Manner
from benchmarks.soak.gateway.spoken import Spoken
from benchmarks.soak.lines import Line

KEY, FEW_KEY = "key-of-the-soak", "key-of-few-requests"
NOTHING = "left before any answer"
AUDIO = "audio"
BROKEN = "connection: "  # refused or broken off
VOICES = "/v1/audio/voices"
RECORDING = ROOT / "examples" / "demo_voice" / "recordings" / "prompt.wav"
LONG_TOKENS = 100
_FORMATS = ("pcm", "wav", "flac", "opus", "mp3", "aac")


@dataclass(frozen=True)
class Scene:
    """Scene of a misdeed: the gateway, and the lines of the client.

    Attributes:
        lines: lines that the client may ask for.
        idle_s: seconds after which the gateway drops a client that does not read or send.
    """

    door: Door
    lines: list[Line]
    random: Random
    idle_s: float

    def line(self, at_least: int = 0) -> Line:
        return self.random.choice([line for line in self.lines if len(line.tokens) >= at_least])

    def moment(self, at_most_s: float = 1.0) -> None:
        time.sleep(self.random.uniform(0.0, at_most_s))

    def speech(self, **fields: Any) -> bytes:
        """Request for a long line in any format, with other fields."""
        manner = Manner.draw(self.random)
        audio_format = self.random.choice(_FORMATS)
        body = replace(manner, path=SPEECH, audio_format=audio_format).body(self.line(LONG_TOKENS))
        return self.door.request(SPEECH, body | fields)

    def pcm(self) -> tuple[Spoken, Manner]:
        """Line and manner of a request whose audio is compared."""
        manner = replace(Manner.draw(self.random), path=SPEECH, audio_format="pcm", events=False)
        return Spoken(self.line(), "pcm"), manner


def whole(spoken: Spoken) -> str:
    """Checks an answer that should be whole, and returns `AUDIO` or the failure."""
    spoken.check()
    return spoken.failure or AUDIO


def upload(door: Door, name: str, recording: bytes) -> bytes:
    """Request that makes a voice of a recording."""
    content = (
        b'--x\r\ncontent-disposition: form-data; name="name"\r\n\r\n%s\r\n'
        b'--x\r\ncontent-disposition: form-data; name="audio_sample"; filename="a"\r\n\r\n'
        b"%s\r\n--x--\r\n" % (name.encode(), recording)
    )
    head = (
        f"POST {VOICES} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        "content-type: multipart/form-data; boundary=x\r\n"
    )
    return with_key(head, door) + content


def with_key(head: str, door: Door) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in door.headers.items()]
    return "".join([head, *lines, "\r\n"]).encode()
