"""Sentences of a text that arrives in pieces."""

from __future__ import annotations

import re

# A sentence ends at a mark before white space, at a Chinese or Japanese mark, or at a line break.
# "3.5" and "token2wav.yaml" have no white space after the mark.
_END = re.compile(r"(?<=[.!?…])([\"')\]”’]*)\s+|(?<=[。！？])|\n+")


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
        text, start, sentences = self._rest + piece, 0, []
        for end in _END.finditer(text):
            sentences.append(text[start : end.start()] + (end[1] or ""))
            start = end.end()
        self._rest = text[start:]
        while len(self._rest) > self._longest:
            cut = self._rest.rfind(" ", 1, self._longest) + 1 or self._longest
            sentences.append(self._rest[:cut])
            self._rest = self._rest[cut:]
        return [sentence.strip() for sentence in sentences if _has_words(sentence)]

    def close(self) -> list[str]:
        """Ends the text, and returns its last sentence, if there is one."""
        rest, self._rest = self._rest.strip(), ""
        return [rest] if _has_words(rest) else []


def _has_words(sentence: str) -> bool:
    """Returns whether a sentence has a letter or digit. A language model can say nothing else."""
    return any(character.isalnum() for character in sentence)
