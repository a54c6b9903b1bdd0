"""Aligner for English: forced alignment by pocketsphinx, whose package contains its model.

A word that is not in the dictionary gets a rough pronunciation from its letters. So its own times
are rough too, but the words around it keep theirs.
"""

from __future__ import annotations

import re
import unicodedata

import numpy as np
from numpy.typing import NDArray
from pocketsphinx import Decoder

from token2wav_gateway.words.aligners import Word

_RATE_HZ = 16_000
_FRAMES_A_SECOND = 100
# Words in the dictionary, besides its own, from which on a new decoder is made: this bounds memory.
_MOST_ADDED = 2000
# Probability of a pause after a word. The default of pocketsphinx, for speech without pauses, moves
# pauses into words: with it, 95 % of the errors are below 88 ms instead of 46 ms.
_PAUSE_PROBABILITY = 0.5
# Noise that is added, in steps of 16 bits (-70 dBFS): in digital silence the decoder loses words.
_NOISE = 10.0
_SPOKEN = re.compile(r"[a-z]+(?:'[a-z]+)*|[0-9]+")
_APOSTROPHES = str.maketrans("’‘", "''")
_LONGEST_NUMBER = 9  # digits; longer numbers are read digit by digit

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = ((1_000_000, "million"), (1000, "thousand"), (100, "hundred"))

# Usual sounds of English letters in ARPABET, for words that are not in the dictionary.
_TABLE = """
sh SH, ch CH, th TH, ph F, ng NG, ck K, qu K W, oo UW, ee IY, ea IY, ou AW, ow OW, ai EY, ay EY,
a AE, b B, c K, d D, e EH, f F, g G, h HH, i IH, j JH, k K, l L, m M, n N, o AA, p P, q K, r R, s S,
t T, u AH, v V, w W, x K S, y IY, z Z
"""
_SOUNDS = dict(entry.strip().split(" ", 1) for entry in _TABLE.split(","))
_LETTERS = re.compile("|".join(sorted(_SOUNDS, key=len, reverse=True)))


class PocketsphinxAligner:
    """Aligner for English."""

    rate_hz = _RATE_HZ

    def __init__(self) -> None:
        self._decoder = _decoder()
        self._added = 0

    def align(self, text: str, samples: NDArray[np.int16]) -> list[Word]:
        """Returns the words of an English text; see `Aligner.align`.

        Words are separated by white space, and keep their punctuation. A word without a Latin
        letter or a digit has no time.

        Raises:
            RuntimeError: the audio does not fit the text.
        """
        words = [(word, spoken_forms(word)) for word in text.split()]
        words = [(word, forms) for word, forms in words if forms]
        if not words:
            return []
        if self._added >= _MOST_ADDED:
            self._decoder, self._added = _decoder(), 0
        for _, forms in words:
            for form in forms:
                self._learn(form)
        self._decoder.set_align_text(" ".join(form for _, forms in words for form in forms))
        noise = _NOISE * np.random.default_rng(0).standard_normal(len(samples))
        noisy = np.clip(samples + noise, -(2**15), 2**15 - 1)
        self._decoder.start_utt()
        self._decoder.process_raw(noisy.astype("<i2").tobytes(), full_utt=True)
        self._decoder.end_utt()
        times = [
            (segment.start_frame / _FRAMES_A_SECOND, (segment.end_frame + 1) / _FRAMES_A_SECOND)
            for segment in self._decoder.seg() or ()
            if not segment.word.startswith(("<", "["))  # silence and noise
        ]
        if len(times) != sum(len(forms) for _, forms in words):
            raise RuntimeError("the audio does not fit the text")
        aligned, start = list[Word](), 0
        for word, forms in words:
            end = start + len(forms)
            aligned.append(Word(word, times[start][0], times[end - 1][1]))
            start = end
        return aligned

    def _learn(self, form: str) -> None:
        """Adds a word to the dictionary if it is not there."""
        if self._decoder.lookup_word(form) is not None:
            return
        self._decoder.add_word(form, pronunciation(form), True)
        self._added += 1


def spoken_forms(word: str) -> list[str]:
    """Returns a written word as the words that are spoken: `42nd-floor` as forty, two, nd, floor.

    Only Latin letters, without their accents, and digits are spoken.
    """
    plain = unicodedata.normalize("NFKD", word.translate(_APOSTROPHES)).lower()
    letters = "".join(letter for letter in plain if not unicodedata.combining(letter))
    forms = list[str]()
    for match in _SPOKEN.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", letters)):
        forms += _number(match) if match[0].isdigit() else [match]
    return forms


def pronunciation(form: str) -> str:
    """Returns a rough pronunciation of a word in ARPABET, such as `B AA T` for `bot`."""
    return " ".join(_SOUNDS[letters] for letters in _LETTERS.findall(form))


def _number(digits: str) -> list[str]:
    if len(digits) > _LONGEST_NUMBER or (digits[0] == "0" and len(digits) > 1):
        return [_ONES[int(digit)] for digit in digits]
    number = int(digits)
    century, rest = divmod(number, 100)
    if 10 < century < 20 and rest:  # as a year is read
        return [*_cardinal(century), *(["oh"] if rest < 10 else []), *_cardinal(rest)]
    return _cardinal(number)


def _cardinal(number: int) -> list[str]:
    for scale, name in _SCALES:
        if number >= scale:
            count, rest = divmod(number, scale)
            return [*_cardinal(count), name, *(_cardinal(rest) if rest else [])]
    if number < len(_ONES):
        return [_ONES[number]]
    tens, ones = divmod(number, 10)
    return [_TENS[tens], *([_ONES[ones]] if ones else [])]


def _decoder() -> Decoder:
    return Decoder(samprate=_RATE_HZ, loglevel="FATAL", lm=None, silprob=_PAUSE_PROBABILITY)
