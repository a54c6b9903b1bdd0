"""Aligners, which find the time of every word of a known text in its audio.

`pocketsphinx` is included. Another distribution adds an aligner with an entry point of the group
`token2wav.aligners`, whose value is a class or function that takes no arguments and returns an
`Aligner` or a `WholeAligner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from token2wav.plugins import Plugins

# Classes or functions that take no arguments and return an aligner.
ALIGNERS = Plugins(
    "token2wav.aligners",
    {"pocketsphinx": "token2wav_gateway.words.pocketsphinx_aligner:PocketsphinxAligner"},
)


class Word(NamedTuple):
    """Word of a text, with its time in the audio.

    Attributes:
        word: piece of the text, as it stands there.
        start_s: seconds from the start of the audio to the start of the word.
        end_s: seconds from the start of the audio to the end of the word.
    """

    word: str
    start_s: float
    end_s: float

    @property
    def fields(self) -> dict[str, Any]:
        """Word as an object of JSON, with times in milliseconds."""
        return {
            "word": self.word,
            "start_ms": round(1000 * self.start_s),
            "end_ms": round(1000 * self.end_s),
        }


class Alignment(Protocol):
    """Alignment of a text with its audio, which arrives in pieces."""

    def feed(self, samples: NDArray[np.int16]) -> Sequence[Word]:
        """Adds audio, and returns the next words whose ends more audio cannot move.

        Args:
            samples: (n,) audio at the rate of the aligner.
        """

    def finish(self) -> Sequence[Word]:
        """Ends the audio, and returns the other words."""


class Aligner(Protocol):
    """Aligner. It runs in a process of its own. Any exception means that the times of this text are
    unknown.

    Attributes:
        rate_hz: sample rate of the audio that it takes.
    """

    rate_hz: int

    def begin(self, text: str) -> Alignment:
        """Begins a text. Several texts are aligned at the same time.

        The words of an alignment are those of the text in their order. Words without a sound may be
        left out.
        """


class WholeAligner(Protocol):
    """Aligner that needs the whole audio of a text. Its words are known after the audio.

    Attributes:
        rate_hz: sample rate of the audio that it takes.
    """

    rate_hz: int

    def align(self, text: str, samples: NDArray[np.int16]) -> Sequence[Word]:
        """Returns the words of a text in their order; see `Aligner.begin`.

        Args:
            samples: (n,) audio at `rate_hz`.
        """


class _WholeAlignment:
    def __init__(self, aligner: WholeAligner, text: str) -> None:
        self._aligner, self._text = aligner, text
        self._pieces = [np.zeros(0, np.int16)]

    def feed(self, samples: NDArray[np.int16]) -> Sequence[Word]:
        self._pieces.append(samples)
        return []

    def finish(self) -> Sequence[Word]:
        return self._aligner.align(self._text, np.concatenate(self._pieces))


def begin(aligner: Aligner | WholeAligner, text: str) -> Alignment:
    """Begins a text with either kind of aligner."""
    if hasattr(aligner, "begin"):
        alignment: Alignment = aligner.begin(text)
        return alignment
    return _WholeAlignment(aligner, text)
