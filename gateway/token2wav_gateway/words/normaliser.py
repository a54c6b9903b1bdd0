"""Texts as they are spoken: pronunciations of words, and numbers and abbreviations as words.

`wetext` is an included normaliser. Another distribution adds one with an entry point of the group
`token2wav.normalisers`, whose value is a function (text, language) that returns the text in words.
The language is an English name, such as `German`, a code of another language, or `Auto`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence

import anyio
from anyio import to_process

from token2wav_gateway.plugins import Plugins
from token2wav_gateway.settings import TextSettings
from token2wav_gateway.words.sentences import SentenceSplitter, has_words

log = logging.getLogger(__name__)

NORMALISERS = Plugins(
    "token2wav.normalisers", {"wetext": "token2wav_gateway.words.wetext_normaliser:normalise"}
)
# Characters of a sentence. The time of wetext grows with the square of the length.
LONGEST = 300
_WITHIN_S = 2.0  # for a text, with its wait for texts before it
_LOAD_S = 60.0
_LETTER = r"[^\W\u1100-\uffdc]"  # of a script that writes words apart


class Normaliser:
    """Changes of the settings to texts that are about to be spoken.

    The normaliser runs in a process of its own, which is replaced if a text takes too long. A text
    that it cannot change within 2 s is spoken as it stands, and so are its sentences of more than
    300 characters. Create it in the event loop that uses it.
    """

    def __init__(self, settings: TextSettings) -> None:
        self._settings = settings
        self._free = anyio.CapacityLimiter(1)
        self._loading: asyncio.Task[list[str] | None] | None = None

    def start(self) -> None:
        """Loads the normaliser, unless it is being loaded. No text needs to wait for it then."""
        name = self._settings.normalise
        if name is not None and (self._loading is None or self._loading.done()):
            self._loading = asyncio.create_task(self._normalised(name, ["1"], "Auto", _LOAD_S))

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

    async def __call__(
        self, text: str, language: str, pronunciations: Mapping[str, str] | None = None
    ) -> str:
        """Returns a text as it is to be spoken.

        Args:
            language: English name or code of the language, or `Auto`.
            pronunciations: spellings of the client, which replace those of the settings.
        """
        spellings = {**self._settings.pronunciations, **(pronunciations or {})}
        text = respelled(text, spellings)
        if (name := self._settings.normalise) is None or not has_words(text):
            return text
        splitter = SentenceSplitter(len(text))
        sentences = [*splitter.feed(text), *splitter.close()]
        said = await self._normalised(name, sentences, language, _WITHIN_S)
        if said is None:  # the process may be a new one, which takes longer to load than a text may
            self.start()
            return text
        return " ".join(said)

    async def _normalised(
        self, name: str, sentences: list[str], language: str, within_s: float
    ) -> list[str] | None:
        """Returns sentences in words; None if the normaliser fails."""
        try:
            with anyio.fail_after(within_s):
                return await to_process.run_sync(
                    normalised,
                    name,
                    sentences,
                    language,
                    cancellable=True,
                    limiter=self._free,
                )
        except TimeoutError:
            log.warning("normaliser: no answer within %g s", within_s)
        except Exception as error:  # its message may repeat the text, which is never logged
            log.error("normaliser: %s", type(error).__name__)
        return None


def respelled(text: str, spellings: Mapping[str, str]) -> str:
    """Replaces words by their spellings."""
    if not spellings:
        return text
    words = "|".join(re.escape(word) for word in sorted(spellings, key=len, reverse=True))
    pattern = f"(?<!{_LETTER})(?:{words})(?!{_LETTER})"
    return re.sub(pattern, lambda match: spellings[match[0]], text)


def normalised(name: str, sentences: Sequence[str], language: str) -> list[str]:
    """Returns sentences in words. It runs in the process of the normaliser."""
    normalise = NORMALISERS.load(name)
    return [
        str(normalise(sentence, language)) if len(sentence) <= LONGEST else sentence
        for sentence in sentences
    ]
