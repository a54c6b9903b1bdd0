"""Listeners at the scheduler itself, without a server: tokens come at the pace of a language model, audio is timed."""

from __future__ import annotations

import heapq
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.settings import PROMPT_TOKENS
from benchmarks.serving_load import PACE, longest_gap
from token2wav import Token2Wav, Voice
from token2wav.config import LimitConfig
from token2wav.errors import Token2WavError
from token2wav.scheduler import Scheduler, default_workers
from token2wav.streaming.session import AudioChunk
from token2wav.utterance import Observer
from token2wav_client.stats import ChunkTiming

BUFFER_S = 0.5  # of audio, that a player waits for
TOKENS_PER_PUSH = 5
STARTS_WITHIN_S = 4.0  # so that streams are at different places of their chunks
VOICES = 4
_SAMPLE_S = 0.25  # between looks at the cache


@dataclass(eq=False)
class Listener:
    """One utterance as it is heard. Times are in seconds of the monotonic clock.

    Attributes:
        starts: when its first token comes.
        tokens: of the utterance.
        chunks: heard so far; the latency of each counts from the tokens that made it possible.
        error: why it ended early.
        over: whether its last chunk came, or an error.
    """

    starts: float
    tokens: NDArray[np.int64]
    chunks: list[ChunkTiming] = field(default_factory=list)
    error: str | None = None
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def unbroken(self) -> bool:
        """Whether all of it was heard without a gap."""
        return self.over.is_set() and self.error is None and longest_gap(self.chunks, BUFFER_S) <= 0


class _Answer:
    """The scheduler's `Reply` to tokens that were pushed at one time."""

    def __init__(self, listener: Listener, pushed: float) -> None:
        self._listener = listener
        self._pushed = pushed

    def send(self, chunk: AudioChunk) -> None:
        listener, now = self._listener, time.monotonic()
        listener.chunks.append(
            ChunkTiming(
                chunk.index, len(chunk.audio), now - listener.starts, now - self._pushed, None, chunk.sample_rate
            )
        )
        if chunk.final:
            listener.over.set()

    def finish(self) -> None:
        """The tokens are consumed, which nobody here waits for."""

    def fail(self, error: Token2WavError) -> None:
        self._listener.error = str(error)
        self._listener.over.set()

    def is_cancelled(self) -> bool:
        return False


class _Batches(Observer):
    """Counts chunks and batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def computed(self, waited: list[float], flow_seconds: float, vocoder_seconds: float) -> None:
        self.sizes.append(len(waited))


def voices(model: Token2Wav) -> list[Voice]:
    """A few that all streams share."""
    flow, found = model.config.flow, []
    for seed in range(VOICES):
        random = np.random.default_rng(seed)
        found.append(
            Voice(
                random.integers(0, flow.vocab_size, PROMPT_TOKENS),
                random.standard_normal((flow.token_mel_ratio * PROMPT_TOKENS, flow.mel_bands)),
                random.standard_normal(flow.spk_embed_dim),
            )
        )
    return found


def listen(model: Token2Wav, streams: int, seconds: float, patience_s: float) -> dict[str, Any]:
    """Speaks utterances that begin within a few seconds, in real time; what listeners heard, and what it took.

    Args:
        model: to speak, with `voices` in its cache.
        streams: utterances.
        seconds: of each.
        patience_s: after the last token, for audio that is late; then whoever waits has a broken stream.
    """
    batches = _Batches()
    limits = LimitConfig(streams=streams, player_buffer_seconds=BUFFER_S)
    scheduler = Scheduler(model, limits, batches, workers=default_workers(model.engine.device))
    try:
        listeners, late_s, pages = _feed(scheduler, model, streams, seconds)
        deadline = time.monotonic() + patience_s
        for listener in listeners:
            listener.over.wait(max(0.0, deadline - time.monotonic()))
    finally:
        scheduler.close()
    first = [1000 * listener.chunks[0].latency_s for listener in listeners if listener.chunks]
    gaps = [longest_gap(listener.chunks, BUFFER_S) for listener in listeners if listener.chunks]
    return {
        "streams": streams,
        "unbroken": round(sum(listener.unbroken for listener in listeners) / streams, 4),
        "first_audio_ms": {f"p{q}": round(float(np.percentile(first, q)), 1) for q in (50, 90, 99)} if first else None,
        "longest_gap_s": round(max(gaps), 3) if gaps else None,
        "unheard": sum(not listener.chunks for listener in listeners),
        "errors": sorted({listener.error for listener in listeners if listener.error})[:5],
        "mean_batch": round(float(np.mean(batches.sizes)), 2) if batches.sizes else None,
        "largest_batch": max(batches.sizes, default=0),
        "tokens_late_s": round(late_s, 3),
        "pages_per_stream": round(pages / streams, 2),
    }


def _feed(scheduler: Scheduler, model: Token2Wav, streams: int, seconds: float) -> tuple[list[Listener], float, int]:
    """Pushes all tokens when they are due; the listeners, how late the latest push was, and the most pages taken."""
    random, known = np.random.default_rng(0), voices(model)
    begin, late_s, pages, looked = time.monotonic() + 0.2, 0.0, 0, 0.0
    count, vocabulary = round(PACE * seconds), model.config.flow.vocab_size
    spread_s = min(STARTS_WITHIN_S, seconds)
    listeners = [
        Listener(begin + spread_s * index / streams, random.integers(0, vocabulary, count)) for index in range(streams)
    ]
    utterances = [scheduler.open(known[index % VOICES]) for index in range(streams)]
    due = [(listener.starts + TOKENS_PER_PUSH / PACE, index, 0) for index, listener in enumerate(listeners)]
    heapq.heapify(due)
    while due:
        at, index, done = heapq.heappop(due)
        time.sleep(max(0.0, at - time.monotonic()))
        listener, now = listeners[index], time.monotonic()
        late_s = max(late_s, now - at)
        if now - looked > _SAMPLE_S:
            usage = model.pipeline.flow.usage()
            looked, pages = now, max(pages, usage.used - usage.shared)
        stop = min(done + TOKENS_PER_PUSH, count)
        try:
            scheduler.push(utterances[index], listener.tokens[done:stop], _Answer(listener, now), end=stop == count)
        except Token2WavError as error:
            listener.error = listener.error or str(error)
            listener.over.set()
            continue
        if stop < count:
            heapq.heappush(due, (at + (min(stop + TOKENS_PER_PUSH, count) - stop) / PACE, index, stop))
    return listeners, late_s, pages
