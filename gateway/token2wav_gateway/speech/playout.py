"""Playout: which text a listener has heard when the client interrupts it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from token2wav_gateway.words.sentences import has_words

# A word, or a character of a language that writes none apart.
_WORD = re.compile(r"[\u1100-\uffdc]|[^\s\u1100-\uffdc]+")
_FURTHER = re.compile(r"(?<![\u1100-\uffdc])[^\s\u1100-\uffdc]+")  # letters of the same word
_SLACK_S = 1e-5  # half a sample at 48 kHz: sums of durations are rounded
_KEPT_KEYS = 8  # keys that stay although the clock says that they were played: a player may be late
_LETTER_S = 0.065  # of English speech, before the first text of a client is known


@dataclass
class _Part:
    """Text on the time line of the audio.

    Attributes:
        start_s: start on the time line.
        seconds: duration of the audio that was sent.
        whole_s: duration of the audio of the whole text; 0 if it is unknown.
        aligned: characters with known times.
        ends: known ends of its first words: characters of the text, and seconds from the start.
    """

    text: str
    key: Hashable
    start_s: float
    seconds: float = 0.0
    whole_s: float = 0.0
    aligned: int = 0
    ends: list[tuple[int, float]] = field(default_factory=list)

    def heard(self, played_s: float, letter_s: float) -> str:
        """Returns the words that have been played to their end.

        Args:
            letter_s: duration of a letter if that of the text is unknown.
        """
        seconds = played_s - self.start_s + _SLACK_S
        whole_s = self.whole_s or max(self.seconds, letter_s * len(self.text))
        if seconds >= whole_s:
            return self.text
        known, known_s = self.ends[-1] if self.ends else (0, 0.0)
        pace = (whole_s - known_s) / max(1, len(self.text) - known)
        ends = [  # all other letters take the same time
            (word.end(), known_s + pace * (word.end() - known))
            for word in _WORD.finditer(self.text, known)
        ]
        return self.text[: max((at for at, s in (*self.ends, *ends) if s <= seconds), default=0)]


class Playout:
    """Playout of texts. Their audio is sent one after the other.

    A client may say how much it has played. Otherwise the clock of a player decides that starts
    with the first audio, and that waits while it has none.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: list[_Part] = []
        self._sent_s = 0.0  # end of the audio that was sent, on its time line
        self._due = 0.0  # time at which the player has played it

    @property
    def played_s(self) -> float:
        """Seconds of audio that the player has played."""
        return self._sent_s - max(0.0, self._due - self._clock())

    def begin(self, text: str, key: Hashable = None) -> None:
        """Begins a text. Texts of a key belong together. Keys that were played are forgotten, but
        for the last ones.
        """
        latest_keys = list(dict.fromkeys(part.key for part in self._parts))[-_KEPT_KEYS:]
        keys = {key, *latest_keys}
        keys |= {part.key for part in self._parts if part.start_s + part.seconds > self.played_s}
        self._parts = [part for part in self._parts if part.key in keys]
        self._parts.append(_Part(text, key, self._sent_s))

    def extend(self, text: str) -> None:
        self._parts[-1].text = text

    def add(self, seconds: float, whole_s: float) -> None:
        """Counts audio of the text that is sent.

        Args:
            whole_s: duration of the audio of the whole text; 0 if it is unknown.
        """
        part = self._parts[-1]
        part.seconds, part.whole_s = part.seconds + seconds, whole_s
        self._sent_s += seconds
        self._due = max(self._due, self._clock()) + seconds

    def align(self, words: Iterable[Mapping[str, Any]]) -> None:
        """Notes the times of the next words of the text, as `Word.fields`."""
        part = self._parts[-1]
        for word in words:
            part.aligned = part.text.index(word["word"], part.aligned) + len(word["word"])
            further = _FURTHER.match(part.text, part.aligned)  # an aligner may know parts of words
            if further is None or not has_words(further[0]):
                part.ends.append((part.aligned, word["end_ms"] / 1000))

    def heard(self, played_s: float | None = None) -> tuple[Hashable, str]:
        """Returns the key of the text that was played last, and the words of this key that were
        heard.

        Args:
            played_s: seconds of audio that the client has played since it began; None for the
                seconds of the clock.
        """
        played_s = self.played_s if played_s is None else min(played_s, self._sent_s)
        begun = [
            part for part in self._parts if part.seconds and part.start_s + _SLACK_S < played_s
        ]
        if not begun:
            return None, ""
        known = [part for part in self._parts if part.whole_s]
        seconds, letters = sum(part.whole_s for part in known), sum(len(p.text) for p in known)
        letter_s, key = seconds / letters if letters else _LETTER_S, begun[-1].key
        return key, "".join(part.heard(played_s, letter_s) for part in begun if part.key == key)
