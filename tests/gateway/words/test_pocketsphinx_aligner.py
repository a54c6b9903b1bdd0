"""The included aligner: words as they are spoken, and their times in real recordings."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from examples.demo_voice.recordings import PROMPT, SENTENCE
from examples.demo_voice.text import held_out
from testkit.rigs.aligners import align
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import AlignerSettings
from token2wav_gateway.words.aligners import Word
from token2wav_gateway.words.pocketsphinx_aligner import (
    PocketsphinxAligner,
    pronunciation,
    spoken_forms,
)
from token2wav_gateway.words.word_times import SpokenText, WordTimes
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
    words = align(aligner, TEXT, sentence)
    assert [word.word for word in words] == TEXT.split()
    starts = np.array([word.start_s for word in words])
    ends = np.array([word.end_s for word in words])
    assert (starts < ends).all()
    assert (ends[:-1] <= starts[1:]).all()
    assert ends[-1] <= len(sentence) / 16_000 + 0.01
    # Silence of a second before the sentence moves every word by a second.
    later = align(aligner, TEXT, np.concatenate((np.zeros(16_000, np.int16), sentence)))
    moved = np.array([word.start_s for word in later])[1:] - starts[1:]
    assert np.abs(moved - 1).max() < 0.05


@pytest.mark.anyio
async def test_times_from_the_process_of_the_aligner(
    aligner: PocketsphinxAligner, sentence: NDArray[np.int16]
) -> None:
    metrics = Metrics()
    word_times = WordTimes(AlignerSettings(name="pocketsphinx", timeout_s=60), metrics)
    word_times.start()
    try:
        spoken = SpokenText(word_times, TEXT, 16_000)
        spoken.add(sentence)
        words, segments = await spoken.rest()
    finally:
        await word_times.close()
    assert words is not None
    assert [word["word"] for word in words] == TEXT.split()
    whole = align(aligner, TEXT, sentence)  # in one piece, which moves times by steps of 10 ms
    moved = [its["start_ms"] - 1000 * word.start_s for its, word in zip(words, whole, strict=True)]
    assert np.abs(moved).max() <= 30
    end_ms = round(len(sentence) / 16)
    assert segments == [{"text": TEXT, "start_ms": 0, "end_ms": end_ms}]


def test_an_unknown_word_leaves_the_others_their_times(
    aligner: PocketsphinxAligner, sentence: NDArray[np.int16]
) -> None:
    known = align(aligner, TEXT, sentence)
    text = TEXT.replace("river", "rivverr").replace("sun", "☀ sun")
    unknown = [word for word in align(aligner, text, sentence) if word.word != "☀"]
    assert len(unknown) == len(known)
    offsets = [abs(a.start_s - b.start_s) for a, b in zip(known, unknown, strict=True)]
    assert max(offsets) < 0.1


def test_other_words_than_the_text_are_no_alignment(
    aligner: PocketsphinxAligner, sentence: NDArray[np.int16]
) -> None:
    with pytest.raises(RuntimeError):
        align(aligner, " ".join(["incomprehensibility"] * 40), sentence[:16_000])
    assert align(aligner, "漢字 —", sentence) == []
    prompt, rate = soundfile.read(PROMPT, dtype="int16")
    words = align(aligner, PROMPT_TEXT, soxr.resample(prompt, rate, 16_000))  # goes on after it
    assert len(words) == len(PROMPT_TEXT.split())


def test_words_are_told_while_they_are_spoken(aligner: PocketsphinxAligner) -> None:
    """A word has its times at most 0.3 s after its end, and hardly other ones than at the end."""
    for text, recording in ((TEXT, SENTENCE), (PROMPT_TEXT, PROMPT)):
        samples, rate = soundfile.read(recording, dtype="int16")
        samples = np.asarray(soxr.resample(samples, rate, 16_000))
        whole = align(aligner, text, samples)
        alignment, words, heard_s = aligner.begin(text), list[Word](), 0.0
        for piece in np.split(samples, range(640, len(samples), 640)):
            heard_s += len(piece) / 16_000
            told = alignment.feed(piece)
            assert all(heard_s - word.end_s <= 0.3 for word in told)
            words += told
        late = alignment.finish()
        assert len(late) <= 2  # of the end of the audio
        words += late
        assert [word.word for word in words] == [word.word for word in whole] == text.split()
        moved = [
            max(abs(a.start_s - b.start_s), abs(a.end_s - b.end_s))
            for a, b in zip(words, whole, strict=True)
        ]
        assert np.percentile(moved, 95) <= 0.06


def test_texts_are_aligned_side_by_side_and_one_after_the_other(
    aligner: PocketsphinxAligner, sentence: NDArray[np.int16]
) -> None:
    alone = align(aligner, TEXT, sentence)
    alignments = [aligner.begin(TEXT) for _ in range(3)]
    middle = len(sentence) // 2
    words = [[*alignment.feed(sentence[:middle])] for alignment in alignments]
    del alignments[0]  # given up
    for alignment, its_words in zip(alignments, words[1:], strict=True):
        its_words += [*alignment.feed(sentence[middle:]), *alignment.finish()]
    assert words[1] == words[2]
    assert align(aligner, TEXT, sentence) == alone
