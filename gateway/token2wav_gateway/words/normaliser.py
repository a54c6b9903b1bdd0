"""Texts as they are spoken: pronunciations of words, and numbers and abbreviations as words."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import partial

import anyio

from token2wav_gateway.settings import TextSettings
from token2wav_gateway.words.normaliser_worker import WITHIN_S, load, normalised
from token2wav_gateway.words.worker import Worker, WorkerError

log = logging.getLogger(__name__)

_WORK_S = 20.0  # after which a process hangs
_LETTER = r"[^\W\u1100-\uffdc]"  # of a script that writes words apart


class Normaliser:
    """Spoken form of texts, by the pronunciations and the normaliser of the settings.

    The normaliser runs in a process of its own, which changes one text after the other. A text that
    is not changed within 2 s is spoken as it stands, and so is a text while the process is started.

    Args:
        longest: most characters of a text that is changed.
    """

    def __init__(self, settings: TextSettings, longest: int) -> None:
        self._settings = settings
        self._longest = longest
        self._worker: Worker | None = None
        if (name := settings.normalise) is not None:
            self._worker = Worker(f"normaliser {name}", partial(load, name), _WORK_S)

    async def start(self) -> None:
        """Starts the process, and waits until it has loaded the normaliser."""
        if self._worker is not None:
            await self._worker.started()

    async def close(self) -> None:
        """Ends the process. Texts that wait for it are spoken as they stand."""
        if self._worker is not None:
            await self._worker.close()

    async def __call__(
        self, text: str, language: str, pronunciations: Mapping[str, str] | None = None
    ) -> str:
        """Returns a text as it is to be spoken.

        Args:
            language: English name or code of the language, or `Auto`.
            pronunciations: spellings of the client; they replace spellings of the settings.
        """
        text = respelled(text, {**self._settings.pronunciations, **(pronunciations or {})})
        worker = self._worker
        if worker is None or len(text) > self._longest:
            return text
        if not worker.loaded:
            worker.start()
            return text
        try:
            with anyio.fail_after(WITHIN_S):
                text, problems = await worker.ask(normalised, text, language)
            if problems:  # without words of the text, which is never logged
                log.warning("normaliser: %d sentences stay: %s", len(problems), problems[0])
        except TimeoutError:
            log.warning("normaliser: no answer within %g s", WITHIN_S)
        except WorkerError as error:
            log.error("normaliser: %s", error)
        return text


def respelled(text: str, spellings: Mapping[str, str]) -> str:
    if not spellings:
        return text
    words = "|".join(re.escape(word) for word in sorted(spellings, key=len, reverse=True))
    pattern = f"(?<!{_LETTER})(?:{words})(?!{_LETTER})"
    return re.sub(pattern, lambda match: spellings[match[0]], text)
