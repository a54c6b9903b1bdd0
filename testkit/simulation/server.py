"""Server on simulated time: the library's scheduler and chunker, with costs in place of networks.

Scheduler, policy, chunker and playback clock come from `token2wav/serving`. Only the workers'
threads and the pipeline are replaced: a cost model decides when a batch ends. A worker runs one ODE
step behind the scheduler, as a GPU does: an interruption begins after the step that runs when the
scheduler decides about it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from testkit.models.sized import a_voice
from testkit.replies import silence
from token2wav import AudioChunk, StreamConfig, Voice
from token2wav.assembly import withheld_samples
from token2wav.config import LimitConfig
from token2wav.config.model_config import ModelConfig
from token2wav.serving.hops import HopSchedule
from token2wav.serving.pipeline import Pipeline, Result
from token2wav.serving.turn import Computed, Turn
from token2wav.serving.utterance import Reply, Utterance
from token2wav.serving.utterance_pool import UtterancePool

POLL_SECONDS = 0.05  # of an idle worker, as in `serving/worker.py`


class Events:
    """Queue of events, and the simulated clock. Events of the same time run in their order.

    Attributes:
        now: seconds since the start of the simulation.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Runs an action at a time, or now if the time has passed."""
        heapq.heappush(self._queue, (max(seconds, self.now), next(self._numbers), action))

    def run(self, until: float = math.inf) -> None:
        """Runs all events up to a time, and the events that these add."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()


@dataclass(frozen=True)
class ChunkWork:
    """Work of one chunk.

    Attributes:
        tokens: computed tokens. In a first chunk they include the tokens of the prompt.
        past_tokens: earlier tokens that the chunk attends to.
    """

    tokens: int
    past_tokens: int = 0
    provisional: bool = False


@dataclass(frozen=True)
class Costs:
    """Seconds that a worker needs. A batch takes the sum of all terms.

    Attributes:
        batch_s: seconds of every batch.
        stream_s: seconds of every chunk.
        token_s: seconds of every token.
        past_s: seconds for every chunk and token of its past.
        past_token_s: seconds for every token and token of its past.
        provisional_share: cost of a token of a provisional chunk, relative to a token of a whole
            chunk.
        open_s: seconds to open a stream whose voice is cached.
    """

    batch_s: float = 0.0
    stream_s: float = 0.0
    token_s: float = 0.0
    past_s: float = 0.0
    past_token_s: float = 0.0
    provisional_share: float = 1.0
    open_s: float = 0.0

    def seconds(self, batch: Iterable[ChunkWork]) -> float:
        return self.batch_s + sum(
            self.stream_s
            + chunk.past_tokens * self.past_s
            + self.share(chunk)
            * chunk.tokens
            * (self.token_s + chunk.past_tokens * self.past_token_s)
            for chunk in batch
        )

    def share(self, chunk: ChunkWork) -> float:
        return self.provisional_share if chunk.provisional else 1.0


@dataclass(frozen=True)
class ServerKind:
    """Model, settings and costs that all servers of a fleet share.

    Attributes:
        workers: batches that a server computes at the same time.
        prompt_tokens: tokens of every voice's prompt, for a model with prompts. The voices are
            cached.
    """

    config: ModelConfig
    costs: Costs
    stream: StreamConfig = field(default_factory=StreamConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    workers: int = 1
    prompt_tokens: int = 75

    @cached_property
    def withheld(self) -> int:
        """Samples that the last stage holds back at the end of a chunk."""
        return withheld_samples(self.config, self.stream)

    @cached_property
    def schedule(self) -> HopSchedule:
        return HopSchedule.of(self.stream, self.config, self.withheld)

    @cached_property
    def voice(self) -> Voice:
        return a_voice(self.config, prompt_tokens=self.prompt_tokens)

    def past_tokens(self, start: int) -> int:
        """Tokens before position `start` that a chunk attends to. A codec has none."""
        if self.config.equal_chunks:
            return 0
        window, prefix = (
            self.config.window(self.stream),
            self.config.grid(self.prompt_tokens).prefix,
        )
        return start if window < 0 else min(start, prefix + window * self.config.block_tokens)


class Client(Reply, Protocol):
    """Client of one stream, which learns how each chunk was computed."""

    def computed(self, chunk: ChunkWork, spoken: int) -> None: ...


class SimulatedServer:
    """Server that computes nothing. Its workers take the turns of `serving/worker.py`.

    Args:
        schedule: schedule of hops; None for the schedule of the kind.
        keep_open: whether the first message of a stream keeps its reply open, as clients do.

    Attributes:
        alive: whether the server runs; False after `crash`.
    """

    def __init__(
        self,
        kind: ServerKind,
        events: Events,
        schedule: HopSchedule | None = None,
        *,
        keep_open: bool = True,
    ) -> None:
        self.kind, self.alive = kind, True
        name = kind.config.stages[-1]
        stage: Any = SimpleNamespace(withheld_samples=kind.withheld, prompt_batches=lambda *_: 0)
        pipeline = Pipeline(kind.config, {name: stage}, kind.stream)
        pipeline.schedule = schedule or kind.schedule
        pipeline.load.workers = kind.workers
        self._load = pipeline.load
        self._pool = UtterancePool(pipeline, kind.limits, None, events, lambda: None, kind.workers)
        self._events, self._keep_open = events, keep_open
        self._idle = set(range(1, kind.workers + 1))
        self._polled = False
        self._tokens = kind.config.tokens.zeros(64)
        self._clients: dict[Utterance, Client] = {}
        self._samples: dict[Utterance, tuple[int, int]] = {}  # spoken tokens, sent samples

    @property
    def open_streams(self) -> int:
        return self._pool.open_utterances

    def open(self, client: Client) -> Utterance:
        """Admits a stream.

        Raises:
            LimitError: the server has too many streams.
        """
        utterance = self._pool.open(self.kind.voice, self._forget)
        self._clients[utterance], self._samples[utterance] = client, (0, 0)
        return utterance

    def push(self, utterance: Utterance, count: int, *, end: bool) -> None:
        """Adds tokens to a stream. Messages to a crashed server are lost."""
        if not self.alive:
            return
        while len(self._tokens) < count:
            self._tokens = np.concatenate((self._tokens, self._tokens))
        client = self._clients[utterance]
        keep_open = self._keep_open and not utterance.kept_open
        self._pool.push(utterance, self._tokens[:count], client, end=end, keep_open=keep_open)
        if self._idle:
            self._turn()

    def crash(self) -> list[Client]:
        """Ends the server at once, and returns the clients whose streams are lost."""
        self.alive = False
        lost = list(self._clients.values())
        self._clients.clear()
        return lost

    def _turn(self) -> None:
        """Lets an idle worker open a stream, compute a batch, or wait."""
        if not self.alive or not self._idle:
            return
        worker, events = min(self._idle), self._events
        turn = self._pool.scheduler.next_turn(worker, events.now)
        if turn is None:
            self._poll()
            return
        self._idle.discard(worker)
        chunks, seconds = self._cost(turn)
        steps = 1 if turn.opens else max(1, self.kind.config.ode_steps)
        self._run(turn, chunks, seconds / steps, steps)
        if not turn.opens:
            self._turn()  # another worker may compute the remaining chunks

    def _cost(self, turn: Turn) -> tuple[list[ChunkWork], float]:
        if turn.opens:
            return [], self.kind.costs.open_s
        chunks = [self._work(utterance) for utterance in turn.utterances]
        return chunks, self.kind.costs.seconds(chunks)

    def _run(
        self,
        turn: Turn,
        chunks: Sequence[ChunkWork],
        step_s: float,
        steps: int,
        spent: float = 0.0,
    ) -> None:
        """Runs the next steps of a turn, each of which interruptions may follow.

        Args:
            step_s: seconds of a step.
            spent: seconds of interruptions so far.
        """
        if not self.alive:
            return
        if not steps:
            self._finish(turn, chunks, self._events.now - turn.started - spent)
            self._idle.add(turn.worker)
            self._turn()
            return
        events = self._events

        def ask(left_s: float, spent: float) -> None:
            """Lets the scheduler decide. The present step ends after `left_s`."""
            other = None
            if turn.interruptible and steps > 1 and self.alive:
                other = self._pool.next_interruption(turn, spent)
            if other is None:
                following = partial(self._run, turn, chunks, step_s, steps - 1, spent)
                events.at(events.now + left_s, following)
                return
            work, seconds = self._cost(other)

            def finish() -> None:
                if self.alive:
                    self._finish(other, work, seconds)
                ask(0.0, spent + seconds)

            events.at(events.now + left_s + seconds, finish)

        ask(step_s, spent)

    def _poll(self) -> None:
        if self._polled or not self.open_streams:
            return
        self._polled = True

        def look() -> None:
            self._polled = False
            self._turn()

        self._events.at(self._events.now + POLL_SECONDS, look)

    def _finish(self, turn: Turn, chunks: Sequence[ChunkWork], seconds: float) -> None:
        if chunks and all(chunk.provisional for chunk in chunks):
            self._load.record_batch(len(chunks), seconds)
        results: Sequence[Result] = [None]
        if not turn.opens:
            results = [
                self._result(utterance, chunk)
                for utterance, chunk in zip(turn.utterances, chunks, strict=True)
            ]
        self._pool.finish_turn(turn, Computed(results, seconds, {}))

    def _result(self, utterance: Utterance, work: ChunkWork) -> AudioChunk | None:
        config, chunk = self.kind.config, utterance.chunker.next_chunk
        assert chunk is not None
        new = chunk.stop - chunk.start - chunk.skip
        self._clients[utterance].computed(work, new)
        spoken, sent = self._samples[utterance]
        ready = (spoken + new) * config.samples_per_token
        ready -= 0 if chunk.last else self.kind.withheld
        self._samples[utterance] = spoken + new, max(sent, ready)
        if ready <= sent and not chunk.last:
            return None
        return silence(max(0, ready - sent), config.sample_rate)

    def _work(self, utterance: Utterance) -> ChunkWork:
        chunk = utterance.chunker.next_chunk
        assert chunk is not None
        past = self.kind.past_tokens(chunk.start)
        return ChunkWork(chunk.stop - chunk.start, past, chunk.provisional)

    def _forget(self, utterance: Utterance) -> None:
        del self._clients[utterance], self._samples[utterance]
