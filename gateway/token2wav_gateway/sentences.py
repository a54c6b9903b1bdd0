"""Sentences of a text that arrives in pieces."""

from __future__ import annotations

import re

# A sentence ends at a mark before white space, at a Chinese or Japanese mark, or at a line break.
# "3.5" and "token2wav.yaml" have no white space after the mark.
_END = re.compile(r"(?<=[.!?…])[\"')\]”’]*\s+|(?<=[。！？])|\n+")


class SentenceSplitter:
    """Splitter of a text into sentences.

        splitter = SentenceSplitter(4096)
        splitter.feed("It rains. Take")   # ["It rains."]
        splitter.close()                  # ["Take"]

    Args:
        longest: characters after which a sentence is cut at a space, or anywhere.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._rest = ""

    def feed(self, piece: str) -> list[str]:
        """Returns the sentences that a piece of text completes."""
        *whole, self._rest = _END.split(self._rest + piece)
        while len(self._rest) > self._longest:
            cut = self._rest.rfind(" ", 1, self._longest) + 1 or self._longest
            whole.append(self._rest[:cut])
            self._rest = self._rest[cut:]
        return [sentence.strip() for sentence in whole if sentence.strip()]

    def close(self) -> list[str]:
        """Ends the text, and returns its last sentence, if there is one."""
        rest, self._rest = self._rest.strip(), ""
        return [rest] if rest else []
