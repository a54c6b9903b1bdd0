"""Work of a normaliser in its process: it writes numbers and abbreviations of sentences as words.

`wetext` is included. Another distribution adds a normaliser with an entry point of the group
`token2wav.normalisers`. It names a function (sentence, language) that returns the sentence in
words. The language is an English name, such as `German`, a code of another language, or `Auto`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sentencex import segment

from token2wav.plugins import Plugins
from token2wav_gateway.words.sentences import with_plain_spaces

NORMALISERS = Plugins(
    "token2wav.normalisers", {"wetext": "token2wav_gateway.words.wetext_normaliser:normalise"}
)
# Characters of a sentence. wetext takes up to 60 ms of processor time for 300 characters, and its
# time grows with the square of the length.
LONGEST = 300
WITHIN_S = 2.0  # for a text

_normalise: Callable[[str, str], str]


def load(name: str) -> None:
    """Loads a normaliser."""
    global _normalise
    _normalise = NORMALISERS.load(name)
    _normalise("1", "Auto")  # which may load more


def normalised(text: str, language: str) -> tuple[str, list[str]]:
    """Changes the sentences of a text.

    Returns:
        The text, and the reasons why sentences stay as they are, without words of the text.
    """
    end_s, problems = time.monotonic() + WITHIN_S, list[str]()
    changed, start, plain = list[str](), 0, with_plain_spaces(text)
    for part in segment("en", plain):
        # Of more than 10,000 characters, sentencex drops some of the line breaks.
        at = plain.index(part, start)
        end = at + len(part)
        changed += text[start:at], _changed(text[at:end], language, end_s, problems)
        start = end
    return "".join(changed) + text[start:], problems


def _changed(part: str, language: str, end_s: float, problems: list[str]) -> str:
    """Changes a sentence, and keeps the white space around it."""
    sentence = part.strip()
    if len(sentence) > LONGEST:
        problems.append(f"more than {LONGEST} characters")
    elif time.monotonic() > end_s:
        problems.append("no time")
    elif any(letter.isalnum() for letter in sentence):
        try:
            return part.replace(sentence, str(_normalise(sentence, language)), 1)
        except BaseException as error:  # also SystemExit, which the gateway would raise again
            problems.append(type(error).__name__)
    return part
