"""Listeners of the replicas: each plays one utterance after the other, and compares the audio."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from benchmarks.soak.lines import DEMO, Line, spoken_line
from testkit.models.golden import TINY
from testkit.rigs.serve_command import TOKENS_PER_SECOND
from token2wav import Token2Wav
from token2wav_client import Client, ClientError, ClientVoice
from token2wav_client.client import Utterance
from token2wav_client.listening import stalls
from token2wav_client.token_source import batches, paced


@dataclass
class HeardUtterance:
    """Utterance as a listener heard it.

    Attributes:
        began: time of the opening on the monotonic clock.
        chunks: arrival since the opening and duration of each chunk, in seconds.
    """

    id: str
    tokens: int
    began: float
    chunks: list[tuple[float, float]] = field(default_factory=list)
    fault: str | None = None

    @property
    def silence_s(self) -> float:
        """Longest silence for a listener that plays all audio on arrival, from the opening on."""
        if not self.chunks:
            return 0.0
        arrivals_s, durations_s = zip(*self.chunks, strict=True)
        return max([arrivals_s[0], *stalls(arrivals_s, durations_s)])


class Listener(threading.Thread):
    """Listener that synthesizes one line after the other at the pace of a language model."""

    def __init__(self, client: Client, lines: list[Line], over: threading.Event, seed: int) -> None:
        super().__init__(daemon=True)
        self.heard: list[HeardUtterance] = []
        self._client, self._lines, self._over = client, lines, over
        self._random = random.Random(seed)

    def run(self) -> None:
        self._over.wait(self._random.uniform(0, 10))  # listeners begin at different times
        while not self._over.is_set():
            line = self._random.choice(self._lines)
            audio = []
            with self._client.open(line.voice) as utterance:
                heard = HeardUtterance(utterance.id, len(line.tokens), time.monotonic())
                self.heard.append(heard)
                threading.Thread(target=_push, args=(utterance, line), daemon=True).start()
                try:
                    for chunk in utterance:
                        arrival_s = time.monotonic() - heard.began
                        heard.chunks.append((arrival_s, chunk.duration_s))
                        audio.append(chunk.audio)
                    heard.fault = line.fault(audio)
                except ClientError as error:
                    heard.fault = f"{type(error).__name__}: {error}"


def _push(utterance: Utterance, line: Line) -> None:
    with suppress(ClientError):  # the iterating thread receives the error
        for batch in paced(batches([line.tokens.tolist()], 5), TOKENS_PER_SECOND):
            utterance.push(batch)
        utterance.finish()


class Retries(logging.Handler):
    """Log handler that notes the time and the utterance of each retry of the client.

    The client logs a retry in a thread that has the name of the utterance.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.attempts: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.attempts.append((time.monotonic(), str(record.threadName).removeprefix("utterance-")))


def long_lines() -> list[Line]:
    """Returns utterances of 8 to 20 s, all shorter than the grace time of a stopping server."""
    model, voice = Token2Wav.load(TINY), ClientVoice.load(DEMO / "voice.safetensors")
    tokens = np.load(DEMO / "tokens.npy").astype(np.int32)
    return [
        spoken_line(model, np.resize(tokens, count), "demo", voice)
        for count in (200, 300, 400, 500)
    ]
