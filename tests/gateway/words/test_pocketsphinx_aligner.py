"""The included aligner: words as they are spoken, and their times in real recordings."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from examples.demo_voice.recordings import PROMPT, SENTENCE
from examples.demo_voice.text import held_out
from token2wav_gateway.words import pocketsphinx_aligner
from token2wav_gateway.words.pocketsphinx_aligner import (
    PocketsphinxAligner,
    pronunciation,
    spoken_forms,
)
from token2wav_server.demo import PROMPT_TEXT

TEXT = held_out()[0]


@pytest.fixture(scope="module")
def aligner() -> PocketsphinxAligner:
    return PocketsphinxAligner()


@pytest.fixture(scope="module")
def sentence() -> NDArray[np.int16]:
    samples, rate = soundfile.read(SENTENCE, dtype="int16")
    return np.asarray(soxr.resample(samples, rate, 16_000))


@pytest.mark.parametrize(
    ("word", "forms"),
    [
        ("harbor,", "harbor"),
        ("“It’s", "it's"),
        ("well-known", "well known"),
        ("Café", "cafe"),
        ("7", "seven"),
        ("42nd-floor", "forty two nd floor"),
        ("1,234,567", "one million two hundred thirty four thousand five hundred sixty seven"),
        ("1987", "nineteen eighty seven"),
        ("1905", "nineteen oh five"),
        ("1900", "one thousand nine hundred"),
        ("2026", "two thousand twenty six"),
        ("100", "one hundred"),
        ("007", "zero zero seven"),
        ("1234567890", "one two three four five six seven eight nine zero"),
        ("3.5", "three five"),
        ("漢字", ""),
        ("—", ""),
        ("²", "two"),
    ],
)
def test_words_as_they_are_spoken(word: str, forms: str) -> None:
    assert spoken_forms(word) == forms.split()


def test_a_rough_pronunciation_of_any_letters() -> None:
    assert pronunciation("shbox") == "SH B AA K S"
    assert pronunciation("abcdefghijklmnopqrstuvwxyz").count(" ") == 26  # x has two sounds
    assert pronunciation("o'clock") == "AA K L AA K"


def test_times_of_a_recording(aligner: PocketsphinxAligner, sentence: NDArray[np.int16]) -> None:
    words = aligner.align(TEXT, sentence)
    assert [word.word for word in words] == TEXT.split()
    starts = np.array([word.start_s for word in words])
    ends = np.array([word.end_s for word in words])
    assert (starts < ends).all()
    assert (ends[:-1] <= starts[1:]).all()
    assert ends[-1] <= len(sentence) / 16_000 + 0.01
    # Silence of a second before the sentence moves every word by a second.
    later = aligner.align(TEXT, np.concatenate((np.zeros(16_000, np.int16), sentence)))
    moved = np.array([word.start_s for word in later])[1:] - starts[1:]
    assert np.abs(moved - 1).max() < 0.05


def test_an_unknown_word_leaves_the_others_their_times(
    aligner: PocketsphinxAligner, sentence: NDArray[np.int16]
) -> None:
    known = aligner.align(TEXT, sentence)
    text = TEXT.replace("river", "rivverr").replace("sun", "☀ sun")
    unknown = [word for word in aligner.align(text, sentence) if word.word != "☀"]
    assert len(unknown) == len(known)
    offsets = [abs(a.start_s - b.start_s) for a, b in zip(known, unknown, strict=True)]
    assert max(offsets) < 0.1


def test_other_words_than_the_text_are_no_alignment(
    aligner: PocketsphinxAligner, sentence: NDArray[np.int16]
) -> None:
    with pytest.raises(RuntimeError):
        aligner.align(" ".join(["incomprehensibility"] * 40), sentence[:16_000])
    assert aligner.align("漢字 —", sentence) == []
    prompt, rate = soundfile.read(PROMPT, dtype="int16")
    words = aligner.align(PROMPT_TEXT, soxr.resample(prompt, rate, 16_000))  # goes on after it
    assert len(words) == len(PROMPT_TEXT.split())


def test_added_words_are_bounded(
    sentence: NDArray[np.int16], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pocketsphinx_aligner, "_MOST_ADDED", 3)
    aligner = PocketsphinxAligner()
    first = aligner._decoder
    for index in range(4):
        letter = "bdfg"[index]
        words = aligner.align(f"The {letter}oldd mann{letter} walked.", sentence[:16_000])
        assert len(words) == 4
    assert aligner._decoder is not first
    assert aligner._added <= 4
