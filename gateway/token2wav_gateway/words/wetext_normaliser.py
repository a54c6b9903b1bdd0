"""Normaliser for English and Chinese: the package `wetext`, the rules of WeTextProcessing."""

from __future__ import annotations

import functools

import wetext

_LANGUAGES = {"English": "en", "Chinese": "zh", "Auto": "auto"}


@functools.lru_cache(maxsize=len(_LANGUAGES))
def _normalizer(code: str) -> wetext.Normalizer:
    return wetext.Normalizer(lang=code)


def normalise(text: str, language: str) -> str:
    """Writes numbers, dates, units and abbreviations of a text as words.

    A text in another language than English and Chinese stays as it is.
    """
    code = _LANGUAGES.get(language)
    # wetext fails at two spaces, and at line breaks.
    return text if code is None else _normalizer(code).normalize(" ".join(text.split()))
