"""Work of an aligner in its process: it gets the audio of texts, and returns the times of words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

from token2wav_gateway.words.aligners import ALIGNERS, Aligner, Alignment, WholeAligner, Word, begin
from token2wav_gateway.words.worker import WorkerError

_TOLERANCE_S = 0.05  # by which a word may end after the audio


@dataclass
class _Text:
    """Text, and the audio that has arrived for it.

    Attributes:
        words: words with known times.
        seconds: duration of this audio.
    """

    text: str
    alignment: Alignment
    resampler: soxr.ResampleStream
    words: list[Word] = field(default_factory=list)
    seconds: float = 0.0


_aligner: Aligner | WholeAligner
_texts: dict[int, _Text] = {}


def load(name: str) -> None:
    """Loads an aligner."""
    global _aligner
    _aligner = ALIGNERS.load(name)()


def align(
    number: int, text: str, samples: NDArray[np.int16], rate_hz: int, last: bool
) -> list[Word]:
    """Adds audio of a text, and returns the next words.

    Args:
        number: number of the text.
        text: spoken text, in the first call for the text; else empty.
        samples: (n,) audio at `rate_hz`.
        last: whether the audio ends.
    """
    if text:
        resampler = soxr.ResampleStream(rate_hz, _aligner.rate_hz, 1, dtype="int16")
        _texts[number] = _Text(text, begin(_aligner, text), resampler)
    if (spoken := _texts.pop(number, None)) is None:
        raise WorkerError("its process was replaced while a text was spoken")
    spoken.seconds += len(samples) / rate_hz
    answer: list[Any] = [*spoken.alignment.feed(spoken.resampler.resample_chunk(samples, last))]
    if last:
        answer += spoken.alignment.finish()
    words = checked(answer, spoken.text, spoken.seconds, spoken.words)
    if not last:
        spoken.words += words
        _texts[number] = spoken
    return words


def forget(number: int) -> None:
    """Gives up a text."""
    _texts.pop(number, None)


def checked(answer: Sequence[Any], text: str, seconds: float, before: Sequence[Word]) -> list[Word]:
    """Checks the next words of an aligner.

    Args:
        answer: items (word, start, end).
        seconds: duration of the audio.
        before: earlier words.

    Raises:
        WorkerError: an item has another form, a word is not in the text at its place, or a time is
            not in the audio or not in order.
    """
    words, position, latest = list[Word](), 0, 0.0
    for word in before:
        position, latest = text.index(word.word, position) + len(word.word), word.start_s
    for item in answer:
        name, *times = item if isinstance(item, (list, tuple)) else ("",)
        if not (isinstance(name, str) and name and len(times) == 2):
            raise WorkerError("its answer has a word of another form")
        if (at := text.find(name, position)) < 0:
            raise WorkerError("its answer has a word that is not in the text")
        if not all(isinstance(time, (int, float)) and type(time) is not bool for time in times):
            raise WorkerError("its answer has a time that is not a number")
        start, end = times
        # Numbers that are not finite are outside the audio, and so are integers of any size.
        if not latest <= start <= end <= seconds + _TOLERANCE_S:
            raise WorkerError("its answer has a time out of order, or outside the audio")
        words.append(Word(str(name), float(start), float(min(end, seconds))))
        position, latest = at + len(name), start
    return words
