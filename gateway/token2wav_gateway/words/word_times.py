"""Times of words in speech: an aligner in a process of its own, with bounds.

The audio of a text goes to the client and to the aligner as it is made, and the times of a word
follow when the aligner is certain. An aligner that hangs, crashes or answers rubbish costs the
times of texts, and never their audio.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from token2wav_gateway.encoding import RATE_HZ, mixed_down
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import AlignerSettings
from token2wav_gateway.words.aligner_worker import align, forget, load
from token2wav_gateway.words.aligners import Word
from token2wav_gateway.words.sentences import has_words
from token2wav_gateway.words.worker import Worker, WorkerError

log = logging.getLogger(__name__)


class WordTimes:
    """Aligner of the settings, and the texts that it aligns.

    Create it in the event loop that uses it.

    Attributes:
        worker: process of the aligner; None without an aligner.
    """

    def __init__(self, settings: AlignerSettings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.worker: Worker | None = None
        if (name := settings.name) is not None:
            self.worker = Worker(
                f"aligner {name}", partial(load, name), settings.timeout_s, settings.memory_mib
            )
        self._texts: set[asyncio.Task[None]] = set()
        self._forgotten: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    def start(self) -> None:
        """Starts to load the aligner, so that the first text need not wait for it."""
        if self.worker is not None:
            self.worker.start()

    @property
    def full(self) -> bool:
        """Whether the aligner can take no further text."""
        return len(self._texts) >= self.settings.waiting

    def begin(self, text: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return _task_in(self._texts, text)

    def new_number(self) -> int:
        return next(self._numbers)

    def forget(self, number: int) -> None:
        """Gives up a text, which the process keeps until then."""

        async def forgotten(worker: Worker) -> None:
            with suppress(WorkerError, TimeoutError):  # then the process has nothing to keep
                await worker.ask(forget, number)

        assert self.worker is not None
        _task_in(self._forgotten, forgotten(self.worker))

    async def close(self) -> None:
        for task in tuple(self._texts):
            task.cancel()
        await asyncio.gather(*self._texts, return_exceptions=True)
        if self.worker is not None:
            await self.worker.close()
        await asyncio.gather(*self._forgotten)


def _task_in(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Starts a task that is in a set until it ends."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class SpokenText:
    """Text during its audio, and the times of its words.

    Args:
        text: spoken text.
        rate_hz: sample rate of the audio.
    """

    def __init__(self, word_times: WordTimes, text: str, rate_hz: int = RATE_HZ) -> None:
        self._word_times = word_times
        self._text = text
        self._rate_hz = rate_hz
        self._pieces: list[NDArray[np.int16]] = []  # that the aligner has not got
        self._samples = 0
        self._deadline = math.inf  # of the last words
        self._change = asyncio.Event()
        self._words: list[Word] = []
        self._taken = 0
        self._arrival = asyncio.Event()
        self._aligning: asyncio.Task[None] | None = None
        is_aligned = word_times.worker is not None and has_words(text)
        self._outcome = None if is_aligned else "nothing"

    def add(self, samples: NDArray[np.int16]) -> None:
        """Adds samples: (n,), or (n, channels), of which the mean is aligned."""
        self._samples += len(samples)
        if self._outcome is not None or not len(samples):
            return
        if self._samples > self._word_times.settings.longest_s * self._rate_hz:
            self._end("long")
            self.close()
        elif self._aligning is None and self._word_times.full:
            self._end("refused")
        else:
            self._pieces.append(mixed_down(samples))
            self._change.set()
            if self._aligning is None:
                self._aligning = self._word_times.begin(self._align())

    async def arrival(self) -> None:
        """Waits until further words are known."""
        await self._arrival.wait()

    def take(self) -> list[dict[str, Any]]:
        """Returns the words that have become known since the last call, as objects of JSON."""
        words, self._taken = self._words[self._taken :], len(self._words)
        self._arrival.clear()
        return [word.fields for word in words]

    async def rest(
        self, seconds: float = math.inf
    ) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]:
        """Returns the other words, after all samples were added, and the whole text with its time.

        Args:
            seconds: time after which the words are given up.

        Returns:
            Words as `take` returns them, None for words that are unknown; and a list with the text.
        """
        self._deadline = anyio.current_time() + self._word_times.settings.timeout_s
        self._change.set()
        if self._aligning is not None:
            timeout = None if seconds == math.inf else max(0.0, seconds)
            await asyncio.wait({self._aligning}, timeout=timeout)
        known = self._outcome in ("nothing", "done") or not self._samples
        end_ms = round(1000 * self._samples / self._rate_hz)
        segment = {"text": self._text, "start_ms": 0, "end_ms": end_ms}
        return self.take() if known else None, [segment]

    def close(self) -> None:
        """Gives up a text before its audio is complete."""
        if self._aligning is not None and self._deadline == math.inf:
            self._aligning.cancel()

    def _end(self, outcome: str) -> None:
        self._outcome = outcome
        self._word_times.metrics.alignments.labels(outcome).inc()

    async def _align(self) -> None:
        number, first, last, complete = self._word_times.new_number(), self._text, False, False
        try:
            while not last:
                await self._change.wait()
                self._change.clear()
                last = self._deadline < math.inf
                audio = np.concatenate([np.zeros(0, np.int16), *self._pieces])
                self._pieces.clear()
                self._words += await self._found(number, first, audio, last)
                first = ""
                if len(self._words) > self._taken:
                    self._arrival.set()
            complete = True
            self._end("done")
        except TimeoutError:
            log.warning("aligner: no times within %g s", self._word_times.settings.timeout_s)
            self._end("late")
        except WorkerError as error:
            log.warning("aligner: %s", error)
            self._end("failed")
        finally:
            if not complete:
                self._word_times.forget(number)

    async def _found(
        self, number: int, text: str, audio: NDArray[np.int16], last: bool
    ) -> list[Word]:
        """Asks the aligner for the next words; see `aligner_worker.align`."""
        worker, now = self._word_times.worker, anyio.current_time()
        assert worker is not None
        with anyio.fail_after(min(self._deadline - now, self._word_times.settings.timeout_s)):
            words: list[Word] = await worker.ask(align, number, text, audio, self._rate_hz, last)
        return words
