"""Process of a normaliser, which writes the numbers and abbreviations of sentences as words.

`wetext` is included. Another distribution adds a normaliser with an entry point of the group
`token2wav.normalisers`, whose value is a function (sentence, language) that returns the sentence in
words. The language is an English name, such as `German`, a code of another language, or `Auto`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait

from sentencex import segment

from token2wav.plugins import Plugins

NORMALISERS = Plugins(
    "token2wav.normalisers", {"wetext": "token2wav_gateway.words.wetext_normaliser:normalise"}
)
# Characters of a sentence. wetext takes up to 60 ms of processor time for 300 characters, and its
# time grows with the square of the length.
LONGEST = 300
WITHIN_S = 2.0  # for a text
_LOAD_S, _WORK_S = 60, 20  # after which SIGALRM ends the process
_NICE = 10  # audio goes first

_normalise: Callable[[str, str], str]


def load(name: str) -> None:
    """Prepares the process: loads a normaliser."""
    global _normalise
    signal.alarm(_LOAD_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends the process
    os.nice(_NICE)
    nowhere = os.open(os.devnull, os.O_WRONLY)  # a normaliser may print texts
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    threading.Thread(target=_end_with_gateway, daemon=True).start()
    _normalise = NORMALISERS.load(name)
    _normalise("1", "Auto")  # which may load more
    signal.alarm(0)


def _end_with_gateway() -> None:
    gateway = multiprocessing.parent_process()
    assert gateway is not None
    wait([gateway.sentinel])
    os._exit(1)


def normalised(text: str, language: str) -> tuple[str, list[str]]:
    """Changes the sentences of a text.

    Returns:
        The text, and the reasons why sentences stay as they are, without words of the text.
    """
    signal.alarm(_WORK_S)
    end_s, problems = time.monotonic() + WITHIN_S, list[str]()
    changed, start = list[str](), 0
    for part in segment("en", text):
        # Of more than 10,000 characters, sentencex drops some of the line breaks.
        at = text.index(part, start)
        changed += text[start:at], _changed(part, language, end_s, problems)
        start = at + len(part)
    signal.alarm(0)
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
