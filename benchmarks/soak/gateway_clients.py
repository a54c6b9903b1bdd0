"""Honest clients of a gateway: they speak lines through all of its doors, and check the audio."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import httpx
import numpy as np
from openai import OpenAIError
from websockets.exceptions import WebSocketException

from benchmarks.soak.crowd import WrongAnswerError, broken
from benchmarks.soak.lines import Line
from testkit.rigs import gateway_lines
from testkit.rigs.gateway_lines import DOORS
from testkit.rigs.gateway_rig import GatewayRig

# Tokens per second of the language model, by the mark at the end of a text.
PACES = {".": 60.0, "!": 400.0, "?": 10_000.0}
_SLOW_PAUSE_S = 0.1  # after each piece of audio
# Failures of a connection, which only an outage excuses.
FAILURES = (OSError, httpx.HTTPError, WebSocketException, OpenAIError)


class WrongAudioError(WrongAnswerError):
    """Error for wrong samples. No outage excuses it."""


@dataclass(frozen=True)
class Manner:
    """Manner in which an honest client asks for lines."""

    door: str  # name of the interface
    mark: str = "?"  # mark at the end of texts, which selects the pace of the language model
    slow: bool = False  # the client reads slowly

    @classmethod
    def draw(cls, random: Random) -> Manner:
        return cls(random.choice([*DOORS]), random.choice([*PACES]), random.random() < 0.2)


def voice_id(line: Line) -> str:
    assert line.voice is not None
    return line.voice.id


def speak(
    rig: GatewayRig, key: str, lines: Sequence[Line], manner: Manner
) -> Iterator[tuple[Line, str]]:
    """Speaks lines of one voice over one connection, up to the first failure. Raises
    WrongAudioError if a sample is wrong, or samples are missing or too many.

    Yields:
        Each line, and why its audio is not complete; empty if it is complete.
    """
    try:
        with DOORS[manner.door](rig, key, voice=voice_id(lines[0])) as client:
            for line in lines:
                yield line, (failure := said(client, line, manner))
                if failure:
                    return
    except FAILURES as error:
        yield lines[0], broken(error)


def said(client: gateway_lines.Line, line: Line, manner: Manner) -> str:
    """Speaks a line, checks its samples, and returns why it failed; empty if it did not."""
    audio, client.error = bytearray(), ""
    try:
        client.begin(f"{line.name}{manner.mark}")
        for piece in client.pieces():
            audio += piece
            if manner.slow:
                time.sleep(_SLOW_PAUSE_S)
        failure = client.error
    except FAILURES as error:
        failure = broken(error)
    samples = np.frombuffer(audio[: len(audio) // 2 * 2], np.int16)
    if fault := line.fault([samples], cut_short=bool(failure)):
        raise WrongAudioError(f"'{line.name}' by {manner}: {fault}")
    return failure
