"""Section late_first: time to the first audio of a stream whose tokens arrive when a full batch has
just begun.

Without interruptions, the stream waits for the whole batch. With interruptions, it waits for one or
two ODE steps. A worker of a server computes both cases, in chunks of whole blocks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.chunk_batch import push_first, requests_in, spread_ms
from benchmarks.gpu.chunks import load
from benchmarks.gpu.settings import SETTINGS, Row, Rows, Settings
from benchmarks.gpu.streams import BUFFER_S, Listener
from testkit.models.sized import a_voice
from testkit.patience import PATIENCE_SECONDS, until
from token2wav import BackendError, Token2Wav
from token2wav.config import LimitConfig
from token2wav.serving.turn import Turn
from token2wav.serving.utterance import Utterance
from token2wav.serving.worker import WorkerPool

_BATCHES_BEFORE = 6  # all listeners then have audio, so a batch may be interrupted
_TOKENS = 5000  # of each running stream: more than are computed


def late_first(folder: Path, settings: Settings) -> Rows:
    """Yields a row with interruptions between ODE steps, and one without."""
    stream, storage = SETTINGS["lean"]
    whole_blocks = replace(stream, max_hop_tokens=settings.hops[0])
    model, loaded = load(folder, settings, whole_blocks, cache_storage=storage)
    model.synthesize([1, 2, 3], a_voice(model.config))  # the prompt is shared, so it is left out
    yield "the model", lambda: loaded
    for interrupts in (True, False):
        key = late_first_key(settings.late_streams, interrupts=interrupts)
        yield key, partial(_late_waits, model, settings, interrupts)


def late_first_key(streams: int, *, interrupts: bool) -> str:
    return f"{streams} streams and a late one, with{'' if interrupts else 'out'} interruptions"


def _late_waits(model: Token2Wav, settings: Settings, interrupts: bool) -> Row:
    """Times first chunks of late streams, from the arrival of their tokens to their audio in the
    memory of the host: median, least and most, in ms.
    """
    with requests_in(model, a_voice(model.config), 1) as requests:
        needed = push_first(model, requests)
    with _busy_worker(model, settings.late_streams, interrupts) as rounds:
        waits = [rounds.late_wait(needed) for _ in range(settings.repeats + 1)][1:]
    return {
        "streams": settings.late_streams,
        "batch_ms": spread_ms(rounds.batches[_BATCHES_BEFORE:]),
        "wait_ms": spread_ms(waits),
        "interruptions": rounds.interruptions,
    }


class _Rounds:
    """Full batches of a worker, one after the other.

    Attributes:
        batches: seconds from the first step of each full batch to the first step of the next one.
        interruptions: turns that have interrupted a batch, openings included.
    """

    def __init__(self, workers: WorkerPool, model: Token2Wav, interrupts: bool) -> None:
        self._workers, self._model, self._interrupts = workers, model, interrupts
        self._next_interruption = workers.utterances.next_interruption
        self._turn: Turn | None = None
        self._began = 0.0
        self._batch_begins = threading.Event()
        self.batches: list[float] = []
        self.interruptions = 0

    def next_interruption(self, turn: Turn, spent: float) -> Turn | None:
        """Stands in for the method of the pool, which the worker calls between two ODE steps."""
        if turn is not self._turn and len(turn.utterances) > 1:
            now = time.monotonic()
            self.batches += [now - self._began] if self._turn else []
            self._turn, self._began = turn, now
            self._batch_begins.set()
        interrupting = self._next_interruption(turn, spent) if self._interrupts else None
        self.interruptions += interrupting is not None
        return interrupting

    def late_wait(self, tokens: int) -> float:
        """Opens a stream when the next full batch has just begun, and returns the seconds until its
        first audio.
        """
        until(lambda: len(self.batches) >= _BATCHES_BEFORE)
        self._batch_begins.clear()
        self._batch_begins.wait(PATIENCE_SECONDS)
        listener = Listener(time.monotonic())
        utterance = _open(self._workers, self._model, tokens, listener)
        while not (listener.heard or listener.error):
            time.sleep(0.001)
        self._workers.utterances.cancel(utterance)
        if not listener.heard:
            raise BackendError(f"backend: the late stream got {listener.error}")
        return listener.heard[0][0] - listener.starts


@contextlib.contextmanager
def _busy_worker(model: Token2Wav, streams: int, interrupts: bool) -> Iterator[_Rounds]:
    """Runs streams with tokens for longer than the measurement, and ends them after it."""
    limits = LimitConfig(streams=streams + 1, batch_streams=streams, player_buffer_seconds=BUFFER_S)
    workers = WorkerPool(model.pipeline, limits, workers=1)
    with contextlib.closing(workers):
        rounds = _Rounds(workers, model, interrupts)
        with patch.object(workers.utterances, "next_interruption", rounds.next_interruption):
            for _ in range(streams):
                _open(workers, model, _TOKENS, Listener(time.monotonic()))
            yield rounds


def _open(workers: WorkerPool, model: Token2Wav, tokens: int, listener: Listener) -> Utterance:
    utterance = workers.utterances.open(a_voice(model.config))
    drawn = model.config.tokens.draw(tokens, np.random.default_rng(0))
    workers.utterances.push(utterance, drawn, listener, end=False)
    return utterance
