"""Sentences and clauses of a text that arrives in pieces."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

from sentencex import segment

Granularity: TypeAlias = Literal["none", "sentence", "clause"]

_WORD = re.compile(r"\s+|\S+")
_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")  # white space of several bytes in UTF-8
_CLAUSE_END = re.compile(r"[,;:—–](?=\s)|[，；：、،؛]")
_SHORTEST_CLAUSE = 10  # columns; a shorter one, such as "Well,", is spoken with the next one
# Ends are sought in the last characters only, so that a text without an end takes linear time.
_WINDOW = 256
# Quotation marks and brackets that open the next sentence.
_OPENING = re.compile(r"(?:(?<=\s)[\"']+|[“‘«「『（【《(\[]+)$")
# sentencex does not know initials and ordinal numbers in every language, such as M. in French.
_INITIAL = re.compile(r"(?<!\w)[A-ZÀ-ÖØ-ÞА-Я]\.$")
_ORDINAL = re.compile(r"(?<!\w)(?:[A-ZÀ-ÖØ-ÞА-Я]|\d{1,2})\.$")
_WITH_ORDINALS = frozenset(("cs", "da", "de", "fi", "hu", "nb", "pl"))
_TAIL = 8  # characters of a sentence in which marks, initials and ordinals are sought
# A sentence has ended if it ends before each of these words.
_NEXT_WORDS = ("a", "A", "1")
_END = 64  # characters of a sentence in which its end is sought
_FIRST_WIDE = "\u1100"


class SentenceSplitter:
    """Splitter of a text into sentences or clauses, which do not depend on the pieces of the text.

        splitter = SentenceSplitter(4096)
        splitter.feed("Dr. Ada is 1.5 m tall. He")   # ["Dr. Ada is 1.5 m tall."]
        splitter.feed("r son is at No. 5")           # []
        splitter.close()                             # ["Her son is at No. 5"]

    The library `sentencex` finds the ends of sentences; a line break is an end too. A sentence is
    released when its end is certain: at the white space after it, or else when the next word is
    complete. "Sie kam am 5." may be a sentence, until "Mai" follows.

    Args:
        longest: characters after which a sentence is cut at a space, or anywhere.
        granularity: `none` leaves the text whole, up to `longest` characters.
        language: ISO 639 code of the language, for its abbreviations. The marks of every language
            end a sentence.
    """

    def __init__(
        self, longest: int, granularity: Granularity = "sentence", language: str = "en"
    ) -> None:
        self._longest = longest
        self._granularity = granularity
        self._language = language
        self._rest = ""
        self._word = ""  # the last word, which may be incomplete

    @property
    def empty(self) -> bool:
        """Whether no text is buffered."""
        return not self._rest and not self._word

    def feed(self, piece: str) -> list[str]:
        """Adds a piece of text, and returns the sentences that have certainly ended."""
        sentences: list[str] = []
        for part in _WORD.findall(piece):
            if part.isspace():
                sentences += self._end_word()
                self._rest += part
                if self._has_ended(part):
                    sentences += self._release(len(self._rest))
            else:
                sentences += self._add_letters(part)
            sentences += self._cut()
        return _spoken(sentences)

    def release(self) -> list[str]:
        """Returns the clauses that have ended, or else the complete words, without their end."""
        if self._granularity == "none":
            return []
        *ended, last = _clauses(self._rest)
        return _spoken(self._release(len(self._rest) - (len(last) if ended else 0)))

    def close(self) -> list[str]:
        """Ends the text, and returns its last sentences."""
        sentences = self._end_word()
        sentences += self._release(len(self._rest))
        return _spoken(sentences)

    def _add_letters(self, letters: str) -> list[str]:
        """Adds letters to the last word. A Chinese or Japanese character ends a word."""
        sentences: list[str] = []
        start = 0
        for at, letter in enumerate(letters, start=1):
            if letter >= _FIRST_WIDE and unicodedata.east_asian_width(letter) in "WF":
                self._word += letters[start:at]
                start = at
                sentences += self._end_word()
                sentences += self._cut()
        self._word += letters[start:]
        return sentences

    def _end_word(self) -> list[str]:
        """Ends the last word, and releases the sentences before it."""
        word, self._word = self._word, ""
        before = self._rest.rstrip()
        self._rest += word
        after_mark = bool(before) and not before[-1].isalnum()
        if self._granularity == "none" or not after_mark or not has_words(word):
            return []
        *ended, last = self._parts(self._rest)
        return self._release(len(self._rest) - len(last)) if ended else []

    def _has_ended(self, space: str) -> bool:
        """Returns whether the buffered text ends with a sentence, for any text after this space."""
        marked = self._rest.rstrip()
        if self._granularity == "none" or not marked:
            return False
        if "\n" in space:
            return True
        if marked[-1].isalnum() or not has_words(tail := self._rest[-_END:]):
            return False
        return all(self._parts(tail + word)[-1] == word for word in _NEXT_WORDS)

    def _release(self, end: int) -> list[str]:
        """Removes the buffered text up to an end, and returns its sentences or clauses."""
        text, self._rest = self._rest[:end], self._rest[end:]
        return self._parts(text) if text else []

    def _parts(self, text: str) -> list[str]:
        """Returns the sentences or clauses of a text. Together they are the text."""
        if self._granularity == "none":
            return [text]
        start = max(0, len(text) - _WINDOW)
        lengths = map(len, segment(self._language, with_plain_spaces(text[start:])))
        ends = accumulate(lengths, initial=start)
        parts = self._joined([text[begin:end] for begin, end in pairwise(ends)])
        if self._granularity == "clause":
            parts = [clause for sentence in parts for clause in _clauses(sentence)]
        return [text[:start] + parts[0], *parts[1:]]

    def _joined(self, sentences: list[str]) -> list[str]:
        """Moves opening marks, initials and ordinals to the sentence to which they belong."""
        no_end = _ORDINAL if self._language in _WITH_ORDINALS else _INITIAL
        joined, prefix = [], ""
        for sentence in sentences[:-1]:
            text = prefix + sentence
            end, tail = len(text), text.rstrip()[-_TAIL:]
            if no_end.search(tail):
                end = 0
            # A German quotation ends with the mark that opens an English one.
            elif (opening := _OPENING.search(tail)) and "„" not in text:
                end = len(text.rstrip()) - len(opening[0])
            if end:
                joined.append(text[:end])
            prefix = text[end:]
        return [*joined, prefix + sentences[-1]]

    def _cut(self) -> list[str]:
        sentences: list[str] = []
        while len(self._rest) + len(self._word) > self._longest:
            text = self._rest + self._word
            cut = text.rfind(" ", 1, self._longest) + 1 or self._longest
            sentences.append(text[:cut])
            self._word = text[max(cut, len(self._rest)) :]
            self._rest = self._rest[cut:]
        return sentences


def _clauses(sentence: str) -> list[str]:
    clauses, start = [], 0
    for mark in _CLAUSE_END.finditer(sentence):
        if _columns(sentence[start : mark.end()]) >= _SHORTEST_CLAUSE:
            clauses.append(sentence[start : mark.end()])
            start = mark.end()
    return [*clauses, sentence[start:]]


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text.strip())


def _spoken(sentences: Iterable[str]) -> list[str]:
    """Returns the sentences with a letter or a digit. A language model can say nothing else."""
    return [sentence.strip() for sentence in sentences if has_words(sentence)]


def with_plain_spaces(text: str) -> str:
    """Returns a text of the same length that has no white space of several bytes.

    sentencex panics at such a space between a capital letter and a period.
    """
    return _WIDE_SPACE.sub(" ", text)


def has_words(text: str) -> bool:
    """Returns whether a text has a letter or a digit."""
    return any(letter.isalnum() for letter in text)
