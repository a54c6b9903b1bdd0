"""Text that arrives while it is spoken, for language models that take text as it comes."""

from __future__ import annotations

import asyncio
import math
import unicodedata
from collections.abc import AsyncGenerator

import anyio

from token2wav_gateway.words.sentences import has_words


class GrowingText:
    """Text whose end has not arrived.

    Attributes:
        text: words that have arrived.
        ended: whether no further words are taken.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.ended = False
        self._change = asyncio.Event()

    def add(self, words: str) -> None:
        self.text += words
        self._change.set()

    def end(self) -> None:
        self.ended = True
        self._change.set()

    async def rest(
        self, known: str, pause_s: float = math.inf, longest_s: float = math.inf
    ) -> AsyncGenerator[str, None]:
        """Yields the words after those that are known, as they arrive.

        Args:
            pause_s: seconds without a word after which the text is ended.
            longest_s: seconds from now after which it is ended.
        """
        position, latest = len(known), anyio.current_time() + longest_s
        while True:
            if position < len(self.text):
                yield self.text[position:]
                position = len(self.text)
            elif self.ended:
                return
            else:
                self._change.clear()
                deadline = min(latest, anyio.current_time() + pause_s)
                with anyio.CancelScope(deadline=deadline) as waiting:
                    await self._change.wait()
                if waiting.cancelled_caught:
                    self.end()


class WordFeeder:
    """Feeder of text that arrives in pieces: passes each word on as soon as it is complete.

        feeder = WordFeeder(4096)
        [text] = feeder.feed("It rai")   # text.text is "It "
        feeder.feed("ns to")             # [], and text.text is "It rains "
        feeder.close()                   # [], and text.text is "It rains to"

    If the text was ended meanwhile, the next word begins another one.

    Args:
        longest: characters of a text, after which another one begins. A longer word is cut. Marks
            without a letter or digit begin no text: at most so many are kept for the next one.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._marks = ""  # words without a letter or digit, before a text
        self._word = ""  # the last word, which may be incomplete
        self._text: GrowingText | None = None

    def feed(self, piece: str) -> list[GrowingText]:
        """Passes on the words that a piece completes. Returns texts that begin with it."""
        complete = _end_of_words(piece)
        end = len(self._word) + complete if complete else 0
        text = self._word + piece
        if len(text) - end > self._longest:
            end = len(text)
        self._word = text[end:]
        return self._pass_on(text[:end])

    def close(self) -> list[GrowingText]:
        """Ends the text. Returns texts that begin with its last word."""
        words, self._word = self._word, ""
        begun = self._pass_on(words)
        self._end()
        self._marks = ""
        return begun

    def _pass_on(self, words: str) -> list[GrowingText]:
        begun = list[GrowingText]()
        if self._text is not None and self._text.ended:
            self._text = None
        words, self._marks = self._marks + words, ""
        while words:
            if self._text is None and len(words) <= self._longest and not has_words(words):
                self._marks = words
                break
            cut = self._cut(words)
            first, words = words[:cut], words[cut:]
            if self._text is None and has_words(first):
                self._text = GrowingText("")
                begun.append(self._text)
            if self._text is not None:
                self._text.add(first)
                if words or len(self._text.text) == self._longest:
                    self._end()
        return begun

    def _cut(self, words: str) -> int:
        """Returns the number of characters that the text has room for: whole words, if it can."""
        used = 0 if self._text is None else len(self._text.text)
        room = self._longest - used
        if len(words) <= room:
            return len(words)
        if cut := _end_of_words(words[:room]):
            return cut
        fits_next = len(words) <= self._longest or _end_of_words(words[: self._longest])
        return 0 if used and fits_next else room

    def _end(self) -> None:
        if self._text is not None:
            self._text.end()
            self._text = None


def _end_of_words(text: str) -> int:
    """Returns the number of characters up to the end of the last complete word."""
    ends = (at for at in range(len(text), 0, -1) if _ends_word(text[at - 1]))
    return next(ends, 0)


def _ends_word(letter: str) -> bool:
    return letter.isspace() or unicodedata.east_asian_width(letter) in "WF"
