"""Aligner for English: forced alignment by pocketsphinx, whose package contains its model.

The alignment follows the audio, and a word has its times 0.2 s after its end.

A word that is not in the dictionary gets a rough pronunciation from its letters. So its own times
are rough too, but the words around it keep theirs.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from tempfile import NamedTemporaryFile

import numpy as np
from numpy.typing import NDArray
from pocketsphinx import Decoder

from token2wav_gateway.words.aligners import Word

_RATE_HZ = 16_000
_FRAMES_A_SECOND = 100
# Audio after the end of a word with which the end is settled: then 99 % of the ends move by at most
# 60 ms until the whole audio is known.
_SETTLED_S = 0.2
_GRAMMAR, _PAUSE = "text", "<sil>"
_LAST = "_"  # marks the last sound of a word
_ALL_SOUNDS = """
AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH
"""
# Probability of a pause after a word. Pauses stand between words only: if pocketsphinx may place
# them between sounds too, 95 % of the errors of starts are below 100 ms instead of 52 ms.
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
        self._dictionary = Decoder(samprate=_RATE_HZ, loglevel="FATAL", lm=None)
        self._loudness = self._dictionary.get_cmn(False)
        self._idle: list[Decoder] = []

    def begin(self, text: str) -> PocketsphinxAlignment:
        """Begins an English text; see `Aligner.begin`.

        Words are separated by white space, and keep their punctuation. A word without a Latin
        letter or a digit has no time.
        """
        words = [(word, spoken_forms(word)) for word in text.split()]
        words = [(word, forms) for word, forms in words if forms]
        if not words:
            return PocketsphinxAlignment(words, None, self._idle)
        decoder = self._idle.pop() if self._idle else _decoder()
        grammar = self._grammar([form for _, forms in words for form in forms])
        decoder.add_fsg(_GRAMMAR, decoder.create_fsg(_GRAMMAR, *grammar))
        decoder.activate_search(_GRAMMAR)
        decoder.set_cmn(self._loudness)  # not that of the text before
        return PocketsphinxAlignment(words, decoder, self._idle)

    def _grammar(self, forms: Sequence[str]) -> tuple[int, int, list[tuple[int, int, float, str]]]:
        """Returns first state, last state, and transitions (from, to, probability, sound)."""
        transitions, start, free = [(0, 0, _PAUSE_PROBABILITY, _PAUSE)], 0, 1
        for form in forms:
            ways, end = self._pronunciations(form), free
            free += 1
            for sounds in ways:
                state, share = start, 1 / len(ways)
                for sound in sounds[:-1]:
                    transitions.append((state, free, share, sound))
                    state, free, share = free, free + 1, 1.0
                transitions.append((state, end, share, f"{sounds[-1]}{_LAST}"))
            transitions.append((end, end, _PAUSE_PROBABILITY, _PAUSE))
            start = end
        return 0, start, transitions

    def _pronunciations(self, form: str) -> list[list[str]]:
        sounds = self._dictionary.lookup_word(form) or pronunciation(form)
        found: list[list[str]] = []
        while sounds is not None:
            found.append(sounds.split())
            sounds = self._dictionary.lookup_word(f"{form}({len(found) + 1})")
        return found


class PocketsphinxAlignment:
    """Alignment of one text: a path through the sounds of its words, which follows the audio.

    Pocketsphinx reports a word of its grammar when the next one has ended. Here each sound is a
    word of the grammar, so the end of a spoken word is known a sound later.

    Args:
        words: words of the text, each with its spoken forms.
        decoder: decoder with the grammar of the sounds; None for no words.
        idle: takes the decoder at the end.
    """

    def __init__(
        self, words: list[tuple[str, list[str]]], decoder: Decoder | None, idle: list[Decoder]
    ) -> None:
        self._words = words
        self._decoder = decoder
        self._idle = idle
        self._noise = np.random.default_rng(0)
        self._samples, self._sent, self._end_s = 0, 0, 0.0
        if decoder is not None:
            decoder.start_utt()

    def __del__(self) -> None:
        if self._decoder is not None:  # the text was given up
            self._decoder.end_utt()
            self._idle.append(self._decoder)

    def feed(self, samples: NDArray[np.int16]) -> list[Word]:
        """Adds audio, and returns the next words that have ended `_SETTLED_S` before its end."""
        if self._decoder is None or not len(samples):
            return []
        noisy = samples + _NOISE * self._noise.standard_normal(len(samples))
        clipped = np.clip(noisy, -(2**15), 2**15 - 1)
        self._decoder.process_raw(clipped.astype("<i2").tobytes(), full_utt=False)
        self._samples += len(samples)
        path = _path(self._decoder)[:-1]  # the last sound goes on
        return self._next_words(path, self._samples / _RATE_HZ - _SETTLED_S)

    def finish(self) -> list[Word]:
        """Ends the audio, and returns the other words.

        Raises:
            RuntimeError: the audio does not fit the text.
        """
        decoder, self._decoder = self._decoder, None
        if decoder is None:
            return []
        decoder.end_utt()
        words = self._next_words(_path(decoder), math.inf)
        self._idle.append(decoder)
        if self._sent < len(self._words):
            raise RuntimeError("the audio does not fit the text")
        return words

    def _next_words(self, path: Sequence[tuple[str, float, float]], until_s: float) -> list[Word]:
        """Returns the words of a path that were not returned yet, up to a time."""
        spoken, start_s = list[tuple[float, float]](), None
        for sound, from_s, to_s in path:
            if sound == _PAUSE:
                continue
            start_s = from_s if start_s is None else start_s
            if sound.endswith(_LAST):
                spoken.append((start_s, to_s))
                start_s = None
        found, position = list[Word](), sum(len(forms) for _, forms in self._words[: self._sent])
        for word, forms in self._words[self._sent :]:
            times = spoken[position : position + len(forms)]
            position += len(forms)
            if len(times) < len(forms) or times[-1][1] > until_s:
                break
            # A word that was returned keeps its end, also if the path to it has changed.
            begin_s = max(times[0][0], self._end_s)
            self._end_s = max(times[-1][1], begin_s)
            found.append(Word(word, begin_s, self._end_s))
        self._sent += len(found)
        return found


def _path(decoder: Decoder) -> list[tuple[str, float, float]]:
    """Returns the sounds and pauses that the decoder has found, with their times in seconds."""
    return [
        (part.word, part.start_frame / _FRAMES_A_SECOND, (part.end_frame + 1) / _FRAMES_A_SECOND)
        for part in decoder.seg() or ()
    ]


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
    """Returns a decoder whose words are sounds, each also as the last one of a word."""
    with NamedTemporaryFile("w", suffix=".dict") as file:
        for sound in _ALL_SOUNDS.split():
            file.write(f"{sound} {sound}\n{sound}{_LAST} {sound}\n")
        file.flush()
        return Decoder(
            samprate=_RATE_HZ,
            loglevel="FATAL",
            lm=None,
            dict=file.name,
            fsgusefiller=False,  # pauses within words
            bestpath=False,  # a second search, which leaves out words
        )
