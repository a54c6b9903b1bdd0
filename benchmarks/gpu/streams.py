"""Section streams: the number of utterances that one device serves in real time, without a server.

The listeners are attached directly to the workers. Tokens arrive at the pace of a language model,
and the arrival of audio is timed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.chunk_batch import push_first, requests_in
from benchmarks.gpu.chunks import load
from benchmarks.gpu.settings import PACE, SETTINGS, Row, Rows, Settings
from testkit.models.sized import a_voice
from token2wav import Token2Wav
from token2wav.config import LimitConfig
from token2wav.errors import Token2WavError
from token2wav.serving.audio_output import AudioChunk
from token2wav.serving.clocks import Playback
from token2wav.serving.worker import WorkerPool, default_workers

UNBROKEN = 0.99  # least share of unbroken streams for a number to count as held
BUFFER_S = 0.5  # seconds that a player buffers before it starts
TOKENS_PER_PUSH = 5
STARTS_WITHIN_S = 4.0  # spreads the streams over different positions in their chunks
_VOICES = 4
_GROWTH = 1.5
_CLOSE = 0.05  # relative error of the number at which the search ends


@dataclass(eq=False)
class Listener:
    """Listener of one utterance: the `Reply` that receives all of its audio."""

    starts: float  # time of the first token, in seconds of the monotonic clock
    # arrival and length of every chunk, in seconds
    heard: list[tuple[float, float]] = field(default_factory=list)
    error: str | None = None  # reason why the utterance ended early
    # set when the last chunk or an error has arrived
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def unbroken(self) -> bool:
        """True if the utterance is complete and played without a gap."""
        return self.over.is_set() and self.error is None and not self.gaps_s

    @property
    def gaps_s(self) -> list[float]:
        """Gaps of a player that buffers `BUFFER_S` before it starts."""
        arrivals = iter([arrival for arrival, _ in self.heard])
        player = Playback(lambda: next(arrivals), BUFFER_S)
        return [gap for _, length in self.heard if (gap := player.sent(length)) > 0]

    def send(self, chunk: AudioChunk) -> None:
        self.heard.append((time.monotonic(), len(chunk.audio) / chunk.sample_rate))
        if chunk.final:
            self.over.set()

    def finish(self) -> None:
        """Ignores the end of a request, because no listener waits for it."""

    def fail(self, error: Token2WavError) -> None:
        self.error = self.error or str(error)
        self.over.set()

    def is_cancelled(self) -> bool:
        return False


def streams(folder: Path, settings: Settings) -> Rows:
    """Yields a row for each number of streams that the search tries."""
    stream, storage = SETTINGS[settings.setting]
    model, loaded = load(folder, settings, stream, cache_storage=storage)
    for seed in range(_VOICES):  # all streams share the prompts, so their cost is left out
        model.synthesize([1, 2, 3], a_voice(model.config, seed))
    yield f"{settings.setting}: the model", lambda: loaded
    held: dict[int, bool] = {}
    while (number := next_number(held, settings.streams_from, settings.most_streams)) is not None:
        row = yield (
            f"{settings.setting}: {number} streams",
            partial(listen, model, settings, number),
        )
        # A row without the share was left out, or failed.
        held[number] = row.get("unbroken", 0.0) >= UNBROKEN


def next_number(held: Mapping[int, bool], first: int, most: int) -> int | None:
    """Returns the number of streams to try next, or None at the end of the search.

    The search ends within 5 % of the largest number that was held, or at `most`.

    Args:
        held: for each number tried so far, whether the device held it.
        most: largest number to try.
    """
    low = max((number for number, well in held.items() if well), default=0)
    high = min((number for number, well in held.items() if not well), default=None)
    if high is None:
        return (
            None
            if low >= most
            else min(most, max(first if not low else low + 1, int(_GROWTH * low)))
        )
    return None if high - low <= max(1, int(_CLOSE * low)) else (low + high) // 2


def listen(model: Token2Wav, settings: Settings, number: int) -> Row:
    """Runs utterances that begin within a few seconds in real time, and measures their playback."""
    with requests_in(model, a_voice(model.config), 1) as requests:
        count = push_first(model, requests)
    limits = LimitConfig(
        streams=number, batch_streams=settings.batch_streams, player_buffer_seconds=BUFFER_S
    )
    workers = WorkerPool(model.pipeline, limits, workers=default_workers(model.summary.device))
    with contextlib.closing(workers):
        listeners, late_s = _feed(workers, model, number, settings.stream_s)
        deadline = time.monotonic() + settings.patience_s
        for listener in listeners:
            listener.over.wait(max(0.0, deadline - time.monotonic()))
    # time at which the tokens of a first chunk and of its look-ahead have arrived
    needed = min(-(-count // TOKENS_PER_PUSH) * TOKENS_PER_PUSH / PACE, settings.stream_s)
    gaps = [gap for listener in listeners for gap in listener.gaps_s]
    first = [
        1000 * (listener.heard[0][0] - listener.starts - needed)
        for listener in listeners
        if listener.heard
    ]
    return {
        "setting": settings.setting,
        "streams": number,
        "batch_streams": settings.batch_streams,
        "unbroken": round(sum(listener.unbroken for listener in listeners) / number, 4),
        "first_audio_ms": {f"p{q}": round(float(np.percentile(first, q)), 1) for q in (50, 99)}
        if first
        else {},
        "longest_gap_s": round(max(gaps, default=0.0), 3),
        "errors": sorted({listener.error for listener in listeners if listener.error})[:3],
        "tokens_late_s": round(late_s, 3),
    }


def _feed(
    workers: WorkerPool, model: Token2Wav, number: int, seconds: float
) -> tuple[list[Listener], float]:
    """Pushes all tokens when they are due.

    Returns:
        The listeners, and the largest delay of a push in seconds.
    """
    flow, turns, late_s = model.config, round(PACE * seconds / TOKENS_PER_PUSH), 0.0
    voices = [a_voice(flow, seed) for seed in range(_VOICES)]
    drawn = flow.tokens.draw(number * turns * TOKENS_PER_PUSH, np.random.default_rng(0))
    tokens = drawn.reshape(number, turns, TOKENS_PER_PUSH)
    begin, spread_s = time.monotonic() + 0.2, min(STARTS_WITHIN_S, seconds)
    listeners = [Listener(begin + spread_s * index / number) for index in range(number)]
    utterances = [workers.utterances.open(voices[index % _VOICES]) for index in range(number)]
    waits = (np.arange(turns) + 1) * TOKENS_PER_PUSH / PACE
    due = [
        (listener.starts + wait, index, turn)
        for index, listener in enumerate(listeners)
        for turn, wait in enumerate(waits)
    ]
    for at, index, turn in sorted(due):
        time.sleep(max(0.0, at - time.monotonic()))
        late_s = max(late_s, time.monotonic() - at)
        listener = listeners[index]
        if listener.error is None:
            try:
                workers.utterances.push(
                    utterances[index], tokens[index, turn], listener, end=turn == turns - 1
                )
            except Token2WavError as error:
                listener.fail(error)
    return listeners, late_s
