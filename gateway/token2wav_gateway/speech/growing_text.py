"""Text that arrives while it is spoken, for language models that take text as it comes."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import AsyncGenerator

from token2wav_gateway.words.sentences import has_words


class GrowingText:
    """Text whose end has not arrived.

    Attributes:
        text: words that have arrived.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._ended = False
        self._change = asyncio.Event()

    def add(self, words: str) -> None:
        """Adds words."""
        self.text += words
        self._change.set()

    def end(self) -> None:
        """Ends the text."""
        self._ended = True
        self._change.set()

    async def rest(self, known: str) -> AsyncGenerator[str, None]:
        """Yields the words after those that are known, as they arrive."""
        position = len(known)
        while True:
            if position < len(self.text):
                yield self.text[position:]
                position = len(self.text)
            elif self._ended:
                return
            else:
                self._change.clear()
                await self._change.wait()


class WordFeeder:
    """Feeder of text that arrives in pieces: passes each word on as soon as it is complete.

        feeder = WordFeeder(4096)
        [text] = feeder.feed("It rai")   # text.text is "It "
        feeder.feed("ns to")             # [], and text.text is "It rains "
        feeder.close()                   # [], and text.text is "It rains to"

    Args:
        longest: characters after which another text begins.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._held = ""  # words without a letter or digit, and the last word
        self._text: GrowingText | None = None

    def feed(self, piece: str) -> list[GrowingText]:
        """Passes on the words that a piece completes. Returns texts that begin with it."""
        text = self._held + piece
        complete = max((at for at, letter in enumerate(text, 1) if _ends_word(letter)), default=0)
        self._held = text[complete:]
        return self._pass_on(text[:complete])

    def close(self) -> list[GrowingText]:
        """Ends the text. Returns texts that begin with its last word."""
        words, self._held = self._held, ""
        begun = self._pass_on(words)
        if self._text is not None:
            self._text.end()
            self._text = None
        self._held = ""
        return begun

    def _pass_on(self, words: str) -> list[GrowingText]:
        begun = list[GrowingText]()
        while words:
            if self._text is None:
                if not has_words(words):
                    self._held = words + self._held
                    break
                self._text = GrowingText("")
                begun.append(self._text)
            room = self._longest - len(self._text.text)
            self._text.add(words[:room])
            words = words[room:]
            if len(self._text.text) >= self._longest:
                self._text.end()
                self._text = None
        return begun


def _ends_word(letter: str) -> bool:
    return letter.isspace() or unicodedata.east_asian_width(letter) in "WF"
