"""Random operations of many threads on one small model: no leaks, and no harm to other streams.

Threads open, push to, finish and drop streams, several at a time, and cancel streams of any thread.
Some streams run through workers, which may interrupt batches. The cache is small, streams send
provisional chunks or use a window, and the engines fail now and then. Every utterance that ends
normally is compared with the audio of the whole utterance, sample by sample. If there are problems,
prints them with the seed and exits with 1.

    .venv/bin/python -m testkit.random_operations --seconds 60
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from random import Random
from typing import Any

from testkit.failing_stages import FAULT, Faults
from testkit.models.golden import TINY, snr_db
from testkit.oracle import Oracle, Tokens
from testkit.patience import PATIENCE_SECONDS
from testkit.replies import RecordingReply, send
from testkit.utterances import a_voice, joined, some_tokens
from token2wav import (
    AudioChunk,
    BackendError,
    LimitError,
    RuntimeConfig,
    StreamClosedError,
    StreamConfig,
    Token2Wav,
    Voice,
)
from token2wav.config import LimitConfig
from token2wav.serving.pipeline import Interruptions, Result, Timed
from token2wav.serving.turn import Turn
from token2wav.serving.utterance import Utterance
from token2wav.serving.worker import WorkerPool
from token2wav.stages.cached_flow import CachedFlow
from token2wav.stages.stage import TokenChunk
from token2wav.stages.waveform import WaveformStage

THREADS, WORKERS = 4, 2
STREAMS_OF_A_THREAD = 3
STEPS = 40  # operations of a thread
CACHE_MIB = 5  # enough pages for some streams, and too few for all
SETTINGS = {
    "provisional": StreamConfig(steps=(2,)),  # few steps, so that there are many operations
    "blocks": StreamConfig(steps=(2,), first_tokens=0),
    "window": StreamConfig(steps=(2,), left_blocks=2, max_hop_tokens=25),
    "interruptions": StreamConfig(steps=(4,)),
}
INTERRUPTIONS = "interruptions"  # setting with one worker for all streams, and random interruptions
LIMITS = LimitConfig(streams=6, stream_tokens=900, idle_seconds=PATIENCE_SECONDS)
PROMPTS = (0, 28, 41, 53)
SAME_DB = 40  # phase integrates float rounding, as in tests/families/cosyvoice3/tolerances.py


class OpenUtterance(ABC):
    """Utterance in progress.

    Attributes:
        utterance: the utterance of the library.
        sent: tokens that were sent.
        cancelled: whether a thread has cancelled the utterance, or is about to.
    """

    def __init__(self, voice: Voice, tokens: Tokens, utterance: Utterance) -> None:
        self.voice, self.tokens, self.utterance = voice, tokens, utterance
        self.sent, self.cancelled = 0, False

    def portion(self, size: int) -> Tokens:
        portion = self.tokens[self.sent : self.sent + size]
        self.sent += len(portion)
        return portion

    @abstractmethod
    def send(self, tokens: Tokens, *, end: bool) -> None:
        """Sends tokens, and waits until they are consumed."""

    @property
    @abstractmethod
    def audio(self) -> list[AudioChunk]:
        """Audio so far."""

    @abstractmethod
    def cancel(self) -> None: ...


class StreamedUtterance(OpenUtterance):
    """Utterance of a stream of the library."""

    def __init__(self, voice: Voice, tokens: Tokens, model: Token2Wav) -> None:
        self.stream = model.stream(voice)
        self._chunks: list[AudioChunk] = []
        super().__init__(voice, tokens, self.stream._utterance)

    def send(self, tokens: Tokens, *, end: bool) -> None:
        self._chunks += self.stream.finish(tokens) if end else self.stream.push(tokens)

    @property
    def audio(self) -> list[AudioChunk]:
        return self._chunks

    def cancel(self) -> None:
        self.stream.cancel()


class ServedUtterance(OpenUtterance):
    """Utterance that runs through the workers."""

    def __init__(self, voice: Voice, tokens: Tokens, workers: WorkerPool) -> None:
        super().__init__(voice, tokens, workers.utterances.open(voice))
        self._workers = workers
        self._replies: list[RecordingReply] = []

    def send(self, tokens: Tokens, *, end: bool) -> None:
        self._replies.append(send(self._workers, self.utterance, tokens, end=end))
        for reply in self._replies if end else self._replies[-1:]:
            assert reply.over.wait(PATIENCE_SECONDS), "a message was never answered"
            if reply.error is not None:
                raise reply.error

    @property
    def audio(self) -> list[AudioChunk]:
        return [chunk for reply in self._replies for chunk in reply.chunks]

    def cancel(self) -> None:
        self._workers.utterances.cancel(self.utterance)


class Round:
    """Round of operations on its own model.

    Args:
        settings: key of `SETTINGS`.

    Attributes:
        events: counts of each outcome.
        problems: sentences about problems; empty after a good round.
    """

    def __init__(self, seed: int, settings: str) -> None:
        self.events: Counter[str] = Counter()
        self.problems: list[str] = []
        self._name = f"{seed} {settings}"
        self._interrupts = settings == INTERRUPTIONS
        self._model, larger = (
            Token2Wav.load(
                TINY,
                stream=SETTINGS[settings],
                runtime=RuntimeConfig(device="cpu", backend="torch", cache_mib=mib),
            )
            for mib in (CACHE_MIB, 4 * CACHE_MIB)
        )
        self._oracle = Oracle(larger)
        flow, vocoder = self._model.pipeline.flow, self._model.pipeline.vocoder
        assert isinstance(flow, CachedFlow)
        assert isinstance(vocoder, WaveformStage)
        self._flow, self._vocoder = flow, vocoder
        # The speed of the machine has no effect: streams always send provisional chunks.
        self._model.pipeline.clock = lambda: 0.0
        load = self._model.pipeline.load
        load.record_batch = lambda chunks, seconds: None  # type: ignore[method-assign]
        load.delayed = lambda seconds, **_: None  # type: ignore[method-assign]
        self._faults = Faults(Random(f"{self._name} faults"))
        self._faults.inject_into_stages(flow, vocoder)
        self._chunks: dict[Utterance, list[TokenChunk]] = {}
        self._note_chunks()
        self._voices = [a_voice(prompt) for prompt in PROMPTS]
        # Utterances of all threads, which any thread may cancel.
        self._open: list[OpenUtterance] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Runs all threads to their ends, then checks for leftovers."""
        log = _Listening(self.problems)
        logging.getLogger("token2wav").addHandler(log)
        workers = 1 if self._interrupts else WORKERS
        self._workers = WorkerPool(self._model.pipeline, LIMITS, workers=workers)
        if self._interrupts:
            self._interrupt_at_random()
        threads = [
            threading.Thread(target=self._speak, args=(number,), daemon=True)
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        if any(thread.is_alive() for thread in threads):
            self.problems.append(f"{self._name}: a thread does not end")
            return
        self._faults.armed = False
        self._workers.close()
        logging.getLogger("token2wav").removeHandler(log)
        self.events["injected faults"] = self._faults.injected
        self._look_for_leaks()

    def _interrupt_at_random(self) -> None:
        scheduler, random = self._workers.utterances.scheduler, Random(f"{self._name} interrupts")
        scheduler._policy.is_long = lambda tokens: True  # type: ignore[method-assign]
        scheduler._policy.may_interrupt = lambda *_: random.random() < 0.5  # type: ignore[method-assign]
        next_interruption = scheduler.next_interruption

        def counting(turn: Turn, spent: float, now: float) -> Turn | None:
            interrupting = next_interruption(turn, spent, now)
            if interrupting:
                self._count("opened in a batch" if interrupting.opens else "computed in a batch")
            return interrupting

        scheduler.next_interruption = counting  # type: ignore[method-assign]

    def _note_chunks(self) -> None:
        """Records the chunks of every utterance, for computing the expected audio again."""
        pipeline = self._model.pipeline
        advance = pipeline.advance

        def noting(
            utterances: Sequence[Utterance],
            timed: Timed | None = None,
            interruptions: Interruptions | None = None,
        ) -> list[Result]:
            chunks = [utterance.chunker.next_chunk for utterance in utterances]
            audio = advance(utterances, timed, interruptions)
            for utterance, chunk in zip(utterances, chunks, strict=True):
                assert chunk is not None
                self._chunks.setdefault(utterance, []).append(chunk)
            return audio

        pipeline.advance = noting  # type: ignore[method-assign]

    def _speak(self, number: int) -> None:
        random, utterances = Random(f"{self._name} thread {number}"), list[OpenUtterance]()
        operations: list[tuple[Callable[[Random, list[OpenUtterance]], None], int]] = [
            (self._begin, 4),
            (self._continue, 12),
            (self._end, 4),
            (self._drop, 1),
            (self._barge_in, 4),
        ]
        calls, weights = zip(*operations, strict=True)
        for _ in range(STEPS):
            [operation] = random.choices(calls, weights)
            with self._noted(operation.__name__):
                operation(random, utterances)
        while utterances:
            with self._noted("the end"):
                self._end(random, utterances)

    @contextmanager
    def _noted(self, operation: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.problems.append(f"{self._name}: {operation}: {traceback.format_exc()}")

    @contextmanager
    def _may_fail(self, utterance: OpenUtterance | None = None) -> Iterator[None]:
        """Ignores the errors that an operation may end with."""
        try:
            yield
            return
        # The engines open an utterance after its first message, and may reject it then.
        except LimitError:
            if isinstance(utterance, StreamedUtterance):
                raise
            outcome = "refused"
        except BackendError as error:
            if FAULT not in str(error):
                raise
            outcome = "failed"
        except StreamClosedError:
            if utterance is None or not utterance.cancelled:
                raise
            outcome = "cancelled in a call"
        self._count(outcome)
        if utterance is not None:
            self._forget(utterance)

    def _begin(self, random: Random, utterances: list[OpenUtterance]) -> None:
        if len(utterances) == STREAMS_OF_A_THREAD:
            return
        voice = random.choice(self._voices)
        tokens = some_tokens(random.choice((1, 13, 24, 60, 110)), random.randrange(4))
        with self._may_fail():
            utterance: OpenUtterance
            if self._interrupts or random.random() < 0.3:
                utterance = ServedUtterance(voice, tokens, self._workers)
            else:
                utterance = StreamedUtterance(voice, tokens, self._model)
            utterances.append(utterance)
            with self._lock:
                self._open.append(utterance)

    def _continue(self, random: Random, utterances: list[OpenUtterance]) -> None:
        if not utterances:
            return
        utterance = random.choice(utterances)
        portion = utterance.portion(random.choice((0, 1, 3, 8, 20, 40)))
        self._push(utterance, portion, utterances, end=False)

    def _end(self, random: Random, utterances: list[OpenUtterance]) -> None:
        """Ends an utterance with the rest of its tokens, or without further tokens."""
        if not utterances:
            return
        utterance = random.choice(utterances)
        if not utterance.sent or random.random() < 0.5:
            rest = utterance.portion(len(utterance.tokens))
        else:
            rest = utterance.portion(0)
        self._push(utterance, rest, utterances, end=True)
        if utterance in utterances:
            utterances.remove(utterance)
            with self._lock:
                self._open.remove(utterance)
            self._compare(utterance)

    def _push(
        self,
        utterance: OpenUtterance,
        tokens: Tokens,
        utterances: list[OpenUtterance],
        *,
        end: bool,
    ) -> None:
        utterances.remove(utterance)  # an utterance that goes on is added again
        with self._may_fail(utterance):
            utterance.send(tokens, end=end)
            utterances.append(utterance)

    def _drop(self, random: Random, utterances: list[OpenUtterance]) -> None:
        """Drops a stream without ending it.

        Some streams are part of a reference cycle, which only the garbage collector finds.
        """
        streamed = [one for one in utterances if isinstance(one, StreamedUtterance)]
        if not streamed:
            return
        utterance = streamed[0]
        utterances.remove(utterance)
        self._forget(utterance)
        if random.random() < 0.5:
            ring: list[Any] = [utterance.stream]
            ring.append(ring)
            del ring
        del utterance, streamed
        if random.random() < 0.3:
            gc.collect()

    def _barge_in(self, random: Random, utterances: list[OpenUtterance]) -> None:
        """Cancels a stream of any thread, even one in use, and begins another stream at once."""
        with self._lock:
            utterance = random.choice(self._open) if self._open else None
        if utterance is not None:
            utterance.cancelled = True
            utterance.cancel()
            self._count("cancelled")
            self._begin(random, utterances)
            self._continue(random, utterances)

    def _forget(self, utterance: OpenUtterance) -> None:
        with self._lock:
            self._open.remove(utterance)
        self._chunks.pop(utterance.utterance, None)

    def _count(self, event: str) -> None:
        with self._lock:
            self.events[event] += 1

    def _compare(self, utterance: OpenUtterance) -> None:
        """Compares the audio of an utterance with the audio of the whole utterance.

        With provisional chunks, the expected audio is computed from the same chunks.
        """
        chunks = self._chunks.pop(utterance.utterance)
        tokens = utterance.tokens[: utterance.sent]
        provisional = any(chunk.provisional for chunk in chunks)
        if provisional:
            expected = self._oracle.spoken(utterance.voice, chunks)
        else:
            expected = self._oracle.whole(utterance.voice, tokens)
        kind, sent = "provisional" if provisional else "whole", utterance.audio
        assert [chunk.index for chunk in sent] == list(range(len(sent)))
        assert [chunk.final for chunk in sent] == [False] * (len(sent) - 1) + [True]
        audio = joined(sent)
        assert audio.shape == expected.shape
        same_db = snr_db(audio, expected)
        assert same_db > SAME_DB, (
            f"{kind}: {len(audio)} samples are {same_db:.1f} dB from those expected"
        )
        self._count(f"compared: {kind}")

    def _look_for_leaks(self) -> None:
        gc.collect()
        flow, pipeline = self._flow, self._model.pipeline
        left = {
            "utterances": self._workers.utterances.open_utterances,
            "streams": pipeline.open_streams,
            "streams of the flow": flow.open_streams,
            "streams that recompute": flow._recompute.open_streams,
            "prompts in use": flow.prefixes.referenced,
            "pages that are no prompt's": flow.pool.used - flow.prefixes.pages,
            "slots of the vocoder": self._vocoder.store.used,
            "streams with provisional chunks": len(pipeline.load._provisional),
        }
        while flow.prefixes.evict():
            pass
        left["pages of prompts"] = flow.pool.used
        left["slots of the flow"] = flow.states.used
        self.problems += [
            f"{self._name}: {number} {name} are left" for name, number in left.items() if number
        ]
        pages = flow.pool.acquire(flow.pool.capacity)
        if pages != list(range(flow.pool.capacity)):
            self.problems.append(f"{self._name}: pages are free twice: {pages}")


class _Listening(logging.Handler):
    """Log handler that records every warning and error as a problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        self._problems.append(f"log: {self.format(record)}")


def soak(seed: int, seconds: float) -> dict[str, Any]:
    """Runs rounds with all settings in turn until the time is over.

    A round that has begun runs to its end.
    """
    events, problems, deadline = Counter[str](), list[str](), time.monotonic() + seconds
    for number, settings in enumerate(cycle(SETTINGS)):
        if time.monotonic() > deadline:
            return {
                "seed": seed,
                "rounds": number,
                "events": dict(events.most_common()),
                "problems": problems,
            }
        played = Round(seed + number, settings)
        played.run()
        events += played.events
        problems += played.problems
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**32), help="random by default"
    )
    options = parser.parse_args()
    print(json.dumps(result := soak(options.seed, options.seconds)))
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
