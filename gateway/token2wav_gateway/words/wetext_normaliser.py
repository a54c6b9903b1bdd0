"""Normaliser for English and Chinese: the package `wetext`, the rules of WeTextProcessing."""

from __future__ import annotations

import functools
import re

import wetext

# wetext fails at other white space than single spaces, and writes a backslash before quotation
# marks. It fails at other marks, or reads them wrongly: `*5*` as "asterisk five asterisk".
_WORD = r"""[^\s\\"*~#^`|=<>_+@§\[\]{}±×№²³]+"""
_WORDS = re.compile(f"{_WORD}(?: {_WORD})*")
_DIGIT = re.compile(r"\d")
_CHINESE = re.compile("[\u4e00-\u9fff]")
_CODES = {"English": "en", "Chinese": "zh"}


@functools.lru_cache(maxsize=len(_CODES))
def _normalizer(code: str) -> wetext.Normalizer:
    return wetext.Normalizer(lang=code)


def normalise(text: str, language: str) -> str:
    """Writes numbers, dates and units of a sentence as words, and abbreviations beside numbers.

    A text in another language than English and Chinese stays as it is. So do words between two
    marks, or two line breaks, if they have no digit: wetext reads the answer "No." as "number".
    """
    if language == "Auto":
        language = "Chinese" if _CHINESE.search(text) else "English"
    if (code := _CODES.get(language)) is None:
        return text
    return _WORDS.sub(lambda words: _in_words(words[0], code), text)


def _in_words(words: str, code: str) -> str:
    return str(_normalizer(code).normalize(words)) if _DIGIT.search(words) else words
