"""Texts as they are spoken: pronunciations of words, and numbers and abbreviations as words."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import anyio

from token2wav_gateway.settings import TextSettings
from token2wav_gateway.words.normaliser_worker import WITHIN_S, load, normalised

log = logging.getLogger(__name__)

_PAUSE_S = 1.0  # before a process takes the place of another one
_LETTER = r"[^\W\u1100-\uffdc]"  # of a script that writes words apart


class Normaliser:
    """Spoken form of texts, by the pronunciations and the normaliser of the settings.

    The normaliser runs in a process of its own, which changes one text after the other. A text that
    is not changed within 2 s is spoken as it stands. If the process ends, another one is started.

    Args:
        longest: most characters of a text that is changed.
    """

    def __init__(self, settings: TextSettings, longest: int) -> None:
        self._settings = settings
        self._longest = longest
        self._pool: ProcessPoolExecutor | None = None  # whose process has loaded the normaliser
        self._process = 0
        self._restarting: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Starts the process, and waits until it has loaded the normaliser."""
        if (name := self._settings.normalise) is None:
            return
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), load, (name,))
        try:
            self._process = await asyncio.wrap_future(pool.submit(os.getpid))
            self._pool = pool
        except (BrokenProcessPool, OSError):
            log.error("normaliser %s: its process could not be started", name)
        finally:
            if self._pool is not pool:
                pool.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """Ends the process. Texts that wait for it are spoken as they stand."""
        self._closed = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        if self._pool is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            self._pool.shutdown(wait=False)
            self._pool = None

    async def __call__(
        self, text: str, language: str, pronunciations: Mapping[str, str] | None = None
    ) -> str:
        """Returns a text as it is to be spoken.

        Args:
            language: English name or code of the language, or `Auto`.
            pronunciations: spellings of the client, which replace those of the settings.
        """
        text = respelled(text, {**self._settings.pronunciations, **(pronunciations or {})})
        if self._settings.normalise is None or len(text) > self._longest:
            return text
        if (pool := self._pool) is None:
            self._restart()
            return text
        try:
            with anyio.fail_after(WITHIN_S):
                job = pool.submit(normalised, text, language)
                text, problems = await asyncio.wrap_future(job)
            if problems:  # without words of the text, which is never logged
                log.warning("normaliser: %d sentences stay: %s", len(problems), problems[0])
        except TimeoutError:
            log.warning("normaliser: no answer within %g s", WITHIN_S)
        except BrokenProcessPool:
            if pool is self._pool:
                log.error("normaliser: its process has ended")
                self._pool = None
                self._restart()
        return text

    def _restart(self) -> None:
        async def start() -> None:
            await asyncio.sleep(_PAUSE_S)
            await self.start()

        if not self._closed and (self._restarting is None or self._restarting.done()):
            self._restarting = asyncio.create_task(start())


def respelled(text: str, spellings: Mapping[str, str]) -> str:
    if not spellings:
        return text
    words = "|".join(re.escape(word) for word in sorted(spellings, key=len, reverse=True))
    pattern = f"(?<!{_LETTER})(?:{words})(?!{_LETTER})"
    return re.sub(pattern, lambda match: spellings[match[0]], text)
