"""Times of words in speech: an aligner in a process of its own, with bounds.

The audio of a text is sent as it is made. When it is complete, the aligner gets the text and all
samples, and the times follow. An aligner that hangs, crashes or answers rubbish costs the times of
a text, and never its audio.
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
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import soxr
from numpy.typing import NDArray

from token2wav_gateway.encoding import RATE_HZ, mixed_down
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import AlignerSettings, SettingsError
from token2wav_gateway.words import aligners
from token2wav_gateway.words.aligner_worker import ANSWER, LOADED, REQUEST
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


class _AlignerError(Exception):
    """Error of an aligner: it has crashed, answered rubbish, or could not be loaded."""


class WordTimes:
    """Times of words, from the aligner of the settings.

    One text is aligned at a time, in the order of the calls. Create it in the event loop that uses
    it.

    Raises:
        SettingsError: no aligner of this name is installed.
    """

    def __init__(self, settings: AlignerSettings, metrics: Metrics) -> None:
        check_aligner(settings)
        self._settings = settings
        self._metrics = metrics
        self._free = asyncio.Lock()
        self._alignments: set[asyncio.Task[list[Word] | None]] = set()
        self._loading: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._pause_until = -math.inf
        self._requests = itertools.count(LOADED + 1)
        self._closed = False

    @property
    def longest_s(self) -> float:
        """Longest audio in seconds that is aligned; 0 without an aligner."""
        return self._settings.longest_s if self._settings.name is not None else 0.0

    def start(self) -> None:
        """Starts to load the aligner, so that the first text need not wait for it."""
        if self._settings.name is not None:
            self._loading = asyncio.create_task(self._load(self._settings.name))
            # An error that nobody waits for is no error of the event loop.
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def of(self, text: str, samples: NDArray[np.int16] | None) -> list[Word] | None:
        """Finds the words of a text in its audio.

        Args:
            text: what the audio says.
            samples: (n,) audio at 24 kHz; None if it is longer than `longest_s`.

        Returns:
            Words in their order; an empty list if there is no aligner, or nothing to align; None if
            the aligner has failed, took too long, or too many texts wait for it.
        """
        if self._settings.name is None or not has_words(text):
            return []
        if samples is None or len(samples) > self.longest_s * RATE_HZ:
            self._metrics.alignments.labels("long").inc()
            return None
        if not len(samples):
            return []
        if len(self._alignments) >= self._settings.waiting:
            self._metrics.alignments.labels("refused").inc()
            return None
        deadline = anyio.current_time() + self._settings.timeout_s
        # The task goes on if the caller is cancelled, because the process cannot forget a request.
        task = asyncio.create_task(self._aligned(text, samples, deadline))
        self._alignments.add(task)
        task.add_done_callback(self._alignments.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends the aligner."""
        self._closed = True
        alignments = list(self._alignments)
        for task in alignments:
            task.cancel()
        await asyncio.gather(*alignments, return_exceptions=True)
        await self._end()

    async def _aligned(
        self, text: str, samples: NDArray[np.int16], deadline: float
    ) -> list[Word] | None:
        outcome, words = "late", None
        with anyio.move_on_after(deadline - anyio.current_time()):
            try:
                async with self._free:
                    words = await self._ask(await self._running(), text, samples)
                outcome = "done"
            except _AlignerError as error:
                outcome = "failed"
                log.warning("aligner: %s", error)
            except Exception as error:  # its message may repeat the text, which is never logged
                outcome = "failed"
                log.error("aligner: %s", type(error).__name__)
        if outcome == "late":
            log.warning("aligner: no times within %g s", self._settings.timeout_s)
        self._metrics.alignments.labels(outcome).inc()
        return words

    async def _ask(
        self, process: asyncio.subprocess.Process, text: str, samples: NDArray[np.int16]
    ) -> list[Word]:
        """Sends a text to the process, and returns its checked answer.

        If the answer is not read, because of a time-out or an error, the process is replaced.
        """
        encoded, pcm, answer = text.encode(), samples.astype("<i2").tobytes(), None
        number = next(self._requests)
        header = REQUEST.pack(number, len(encoded), len(pcm), RATE_HZ)
        try:
            assert process.stdin is not None
            process.stdin.write(header + encoded + pcm)
            await process.stdin.drain()
            answer = await _read(process, number)
        except (OSError, EOFError):
            raise _AlignerError("its process has crashed") from None
        finally:
            if answer is None:
                with anyio.CancelScope(shield=True):
                    await self._restart()
        if "error" in answer:
            raise _AlignerError(f"a text could not be aligned ({str(answer['error'])[:100]})")
        return checked(answer.get("words"), text, len(samples) / RATE_HZ)

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
                *(name, str(self._settings.memory_mib)),
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
    """Text whose audio is sent, for the times that follow the audio.

    Args:
        text: what the audio says.
        rate_hz: sample rate of the audio.
    """

    def __init__(self, word_times: WordTimes, text: str, rate_hz: int = RATE_HZ) -> None:
        self._word_times = word_times
        self._text = text
        self._rate_hz = rate_hz
        self._pieces: list[NDArray[np.int16]] = []
        self._samples = 0
        self._most = round(word_times.longest_s * rate_hz)

    def add(self, samples: NDArray[np.int16]) -> None:
        """Adds samples: (n,), or (n, channels), of which the mean is aligned."""
        self._samples += len(samples)
        if self._samples > self._most:
            self._pieces.clear()
        else:
            self._pieces.append(mixed_down(samples))

    async def fields(self, seconds: float = math.inf) -> dict[str, Any]:
        """Returns the times as fields of an event, after all samples were added.

        `timestamps` has the words: empty for nothing to align, None for a failed aligner.
        `segments` has the whole text with its exact time.

        Args:
            seconds: time after which the words are given up.
        """
        audio, words = None, None
        with anyio.move_on_after(max(0.0, seconds)):
            if self._samples <= self._most:
                audio = np.concatenate([np.zeros(0, np.int16), *self._pieces])
                if self._rate_hz != RATE_HZ:
                    audio = await asyncio.to_thread(soxr.resample, audio, self._rate_hz, RATE_HZ)
            words = await self._word_times.of(self._text, audio)
        return {
            "timestamps": None if words is None else [word.fields for word in words],
            "segments": [
                {
                    "text": self._text,
                    "start_ms": 0,
                    "end_ms": round(1000 * self._samples / self._rate_hz),
                }
            ],
        }


def check_aligner(settings: AlignerSettings) -> None:
    """Raises SettingsError if no aligner of the name in the settings is installed."""
    if settings.name is not None and settings.name not in (known := aligners.names()):
        raise SettingsError(
            f"aligner.name: {settings.name[:64]!r} is not one of the installed aligners: "
            f"{', '.join(known)}"
        )


def checked(words: Any, text: str, seconds: float) -> list[Word]:
    """Checks the words of an aligner.

    Args:
        words: list of (word, start, end).
        seconds: duration of the audio.

    Raises:
        _AlignerError: an item has another form, a word is not in the text at its place, or a time
            is not in the audio or not in order.
    """
    if not isinstance(words, list):
        raise _AlignerError("its answer has no list of words")
    aligned, position, latest = list[Word](), 0, 0.0
    for item in words:
        if not (isinstance(item, list) and len(item) == 3 and isinstance(item[0], str) and item[0]):
            raise _AlignerError("its answer has a word of another form")
        word, *times = item
        if (found := text.find(word, position)) < 0:
            raise _AlignerError("its answer has a word that is not in the text")
        if not all(type(time) in (int, float) for time in times):
            raise _AlignerError("its answer has a time that is not a number")
        start, end = times
        # Numbers that are not finite are outside the audio, and so are integers of any size.
        if not latest <= start <= end <= seconds + _TOLERANCE_S:
            raise _AlignerError("its answer has a time out of order, or outside the audio")
        aligned.append(Word(word, start, min(end, seconds)))
        position, latest = found + len(word), start
    return aligned


async def _read(process: asyncio.subprocess.Process, number: int) -> dict[str, Any]:
    """Reads the answer of the process to a request.

    Raises:
        EOFError: the process has ended.
        _AlignerError: the answer belongs to another request, is no JSON object, or is too long.
    """
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
