"""Times of words in speech: an aligner in a process of its own, with bounds.

The audio of a text goes to the client and to the aligner as it is made, and the times of a word
follow when the aligner is certain. An aligner that hangs, crashes or answers rubbish costs the
times of texts, and never their audio.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from token2wav_gateway.encoding import RATE_HZ, mixed_down
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import AlignerSettings
from token2wav_gateway.words.aligner_worker import (
    ANSWER,
    DROPPED,
    LAST,
    LOADED,
    ONGOING,
    REQUEST,
)
from token2wav_gateway.words.aligners import Word
from token2wav_gateway.words.sentences import has_words

log = logging.getLogger(__name__)

_LOAD_S = 60.0  # for an aligner to load its model
_PAUSE_S = 30.0  # after an aligner could not be loaded
_END_S = 5.0  # for a killed process to end
_MOST_ANSWER_BYTES = 1 << 20
_TOLERANCE_S = 0.05  # by which a word may end after the audio
# Libraries of linear algebra would start a thread for each core.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, eq=False)
class Request:
    """Audio of a text for the aligner.

    Attributes:
        number: number of the text.
        text: what the audio says, in the first request; else empty.
        samples: (n,) audio.
        state: a constant of `aligner_worker`.
    """

    number: int
    text: str
    samples: NDArray[np.int16]
    rate_hz: int
    state: int


class _AlignerError(Exception):
    """Error of an aligner: it has crashed, answered rubbish, or could not be loaded."""


class WordTimes:
    """Times of words, from the aligner of the settings.

    The aligner answers one request at a time, in the order of the requests. Create it in the event
    loop that uses it.
    """

    def __init__(self, settings: AlignerSettings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._free = asyncio.Lock()
        self._texts: set[asyncio.Task[None]] = set()
        self._requests: set[asyncio.Task[Any]] = set()
        self._loading: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._pause_until = -math.inf
        self._numbers = itertools.count(LOADED + 1)
        self._closed = False

    @property
    def longest_s(self) -> float:
        """Longest audio in seconds that is aligned; 0 without an aligner."""
        return self.settings.longest_s if self.settings.name is not None else 0.0

    def start(self) -> None:
        """Starts to load the aligner, so that the first text need not wait for it."""
        if self.settings.name is not None:
            self._loading = asyncio.create_task(self._load(self.settings.name))
            # An error that nobody waits for is no error of the event loop.
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def full(self) -> bool:
        """Whether the aligner can take no further text."""
        return len(self._texts) >= self.settings.waiting

    def begin(self, text: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(text)
        self._texts.add(task)
        task.add_done_callback(self._texts.discard)
        return task

    def new_number(self) -> int:
        return next(self._numbers)

    async def ask(self, request: Request, deadline: float) -> Any:
        """Sends a request, and returns the next words of its text as the aligner names them.

        Raises:
            _AlignerError: the aligner has failed.
            TimeoutError: it took too long, or requests before this one did.
        """
        deadline = min(deadline, anyio.current_time() + self.settings.timeout_s)
        return await asyncio.shield(self._start(self._ask(request, deadline)))

    def forget(self, text: int) -> None:
        """Gives up a text, which the process keeps until then."""
        request = Request(text, "", np.zeros(0, np.int16), RATE_HZ, DROPPED)
        forgetting = self._start(self._drop(request))
        forgetting.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _start(self, request: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a request. It goes on without the caller: the process cannot forget a request."""
        task = asyncio.create_task(request)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return task

    async def close(self) -> None:
        self._closed = True
        for tasks in (self._texts, self._requests):  # a text that is cancelled asks once more
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._end()

    async def _ask(self, request: Request, deadline: float) -> Any:
        with anyio.fail_after(deadline - anyio.current_time()):
            async with self._free:
                answer = await self._exchange(await self._running(), request)
        if "error" in answer:
            raise _AlignerError(f"a text could not be aligned ({str(answer['error'])[:100]})")
        return answer.get("words")

    async def _drop(self, request: Request) -> None:
        async with self._free:  # however long the requests before it take
            with anyio.fail_after(self.settings.timeout_s):
                await self._exchange(await self._running(), request)

    async def _exchange(
        self, process: asyncio.subprocess.Process, request: Request
    ) -> dict[str, Any]:
        """Sends a request to the process, and returns its answer.

        If the answer is not read, because of a time-out or an error, the process is replaced.
        """
        text, pcm = request.text.encode(), request.samples.astype("<i2").tobytes()
        answer, number = None, next(self._numbers)
        sizes = len(text), len(pcm)
        header = REQUEST.pack(number, request.number, *sizes, request.rate_hz, request.state)
        try:
            assert process.stdin is not None
            process.stdin.write(header + text + pcm)
            await process.stdin.drain()
            answer = await _read(process, number)
        except (OSError, EOFError):
            raise _AlignerError("its process has crashed") from None
        finally:
            if answer is None:
                with anyio.CancelScope(shield=True):
                    await self._restart()
        return answer

    async def _running(self) -> asyncio.subprocess.Process:
        """Returns the process when its aligner is loaded, and starts it if it has ended."""
        if self._loading is None or (
            self._loading.done()
            and (self._loading.exception() or self._loading.result().returncode is not None)
        ):
            if time.monotonic() < self._pause_until:
                raise _AlignerError("it could not be loaded")
            self.start()
        assert self._loading is not None
        return await asyncio.shield(self._loading)

    async def _load(self, name: str) -> asyncio.subprocess.Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "token2wav_gateway.words.aligner_worker"),
                *(name, str(self.settings.memory_mib)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # which may repeat a text
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # a group of its own, which can be killed
            )
        except OSError as error:
            log.error("aligner %s: its process cannot be started: %s", name, error)
            raise _AlignerError("it could not be loaded") from None
        reason, loaded = "its process has crashed while it loaded", False
        try:
            with anyio.move_on_after(_LOAD_S) as waiting, suppress(OSError, EOFError):
                answer = await _read(process, LOADED)
                loaded = answer.get("ready") is True
                reason = str(answer.get("error", reason))
            if loaded:
                return process
            if waiting.cancelled_caught:
                reason = f"it was not loaded within {_LOAD_S:g} s"
        finally:
            if not loaded:
                with anyio.CancelScope(shield=True):
                    await _kill(process)
        self._pause_until = time.monotonic() + _PAUSE_S
        log.error("aligner %s: %s", name, reason)
        raise _AlignerError("it could not be loaded")

    async def _restart(self) -> None:
        await self._end()
        if not self._closed:
            self.start()

    async def _end(self) -> None:
        loading, self._loading = self._loading, None
        if loading is None:
            return
        if not loading.done():
            loading.cancel()
        with suppress(_AlignerError, asyncio.CancelledError):
            await _kill(await loading)


class SpokenText:
    """Text whose audio is sent, and the times of its words.

    Args:
        text: what the audio says.
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
        wanted = word_times.longest_s > 0 and has_words(text)
        self._outcome = None if wanted else "nothing"

    def add(self, samples: NDArray[np.int16]) -> None:
        """Adds samples: (n,), or (n, channels), of which the mean is aligned."""
        self._samples += len(samples)
        if self._outcome is not None or not len(samples):
            return
        if self._samples > self._word_times.longest_s * self._rate_hz:
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
        """Gives up a text whose audio is not complete."""
        if self._aligning is not None and self._deadline == math.inf:
            self._aligning.cancel()

    def _end(self, outcome: str) -> None:
        self._outcome = outcome
        self._word_times.metrics.alignments.labels(outcome).inc()

    async def _align(self) -> None:
        number, first, state, samples = self._word_times.new_number(), self._text, ONGOING, 0
        complete = False
        try:
            while state == ONGOING:
                await self._change.wait()
                self._change.clear()
                state = ONGOING if self._deadline == math.inf else LAST
                audio = np.concatenate([np.zeros(0, np.int16), *self._pieces])
                self._pieces.clear()
                samples += len(audio)
                request = Request(number, first, audio, self._rate_hz, state)
                words = await self._word_times.ask(request, self._deadline)
                complete = state == LAST
                self._words = checked(words, self._text, samples / self._rate_hz, self._words)
                first = ""
                if len(self._words) > self._taken:
                    self._arrival.set()
            self._end("done")
        except TimeoutError:
            log.warning("aligner: no times within %g s", self._word_times.settings.timeout_s)
            self._end("late")
        except _AlignerError as error:
            log.warning("aligner: %s", error)
            self._end("failed")
        except Exception as error:  # its message may repeat the text, which is never logged
            log.error("aligner: %s", type(error).__name__)
            self._end("failed")
        finally:
            if not complete:
                self._word_times.forget(number)


def checked(words: Any, text: str, seconds: float, before: Sequence[Word] = ()) -> list[Word]:
    """Checks the next words of an aligner, and returns them after those before.

    Args:
        words: list of (word, start, end).
        seconds: duration of the audio.

    Raises:
        _AlignerError: an item has another form, a word is not in the text at its place, or a time
            is not in the audio or not in order.
    """
    if not isinstance(words, list):
        raise _AlignerError("its answer has no list of words")
    aligned, position, latest = list(before), 0, 0.0
    for word in before:
        position, latest = text.index(word.word, position) + len(word.word), word.start_s
    for item in words:
        if not (isinstance(item, list) and len(item) == 3 and isinstance(item[0], str) and item[0]):
            raise _AlignerError("its answer has a word of another form")
        name, *times = item
        if (found := text.find(name, position)) < 0:
            raise _AlignerError("its answer has a word that is not in the text")
        if not all(type(time) in (int, float) for time in times):
            raise _AlignerError("its answer has a time that is not a number")
        start, end = times
        # Numbers that are not finite are outside the audio, and so are integers of any size.
        if not latest <= start <= end <= seconds + _TOLERANCE_S:
            raise _AlignerError("its answer has a time out of order, or outside the audio")
        aligned.append(Word(name, start, min(end, seconds)))
        position, latest = found + len(name), start
    return aligned


async def _read(process: asyncio.subprocess.Process, number: int) -> dict[str, Any]:
    """Reads the answer of the process to a request."""
    assert process.stdout is not None
    answered, length = ANSWER.unpack(await process.stdout.readexactly(ANSWER.size))
    if answered != number:
        raise _AlignerError("its answer belongs to another text")
    if length > _MOST_ANSWER_BYTES:
        raise _AlignerError(f"its answer has {length} bytes; at most {_MOST_ANSWER_BYTES} allowed")
    try:
        answer = json.loads(await process.stdout.readexactly(length))
    except (ValueError, RecursionError):
        raise _AlignerError("its answer is no JSON") from None
    if not isinstance(answer, dict):
        raise _AlignerError("its answer is no JSON object")
    return answer


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Ends the process, and the processes that the aligner has started."""
    assert process.stdout is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with anyio.move_on_after(_END_S):
        # asyncio reports the end of a process only after its output was read.
        while await process.stdout.read(_MOST_ANSWER_BYTES):
            pass
        await process.wait()
