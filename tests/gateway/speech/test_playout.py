"""Playout: the text that was heard, by the clock of a player or by what the client says."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
import soxr

from examples.demo_voice.recordings import PROMPT, SENTENCE
from examples.demo_voice.text import held_out
from testkit.rigs.aligners import align
from token2wav_gateway.speech.playout import Playout
from token2wav_gateway.words.pocketsphinx_aligner import PocketsphinxAligner
from token2wav_server.demo import PROMPT_TEXT


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def played(clock: Clock) -> Playout:
    """Plays two utterances, the second one of two sentences, each letter 0.1 s."""
    playout = Playout(clock)
    for text, key in (("It rains. ", 0), ("Stay here. ", 1), ("Come back. ", 1)):
        playout.begin(text, key)
        playout.add(0.5, 0.0)
        playout.add(len(text) / 10 - 0.5, len(text) / 10)
    return playout


@pytest.mark.parametrize(
    ("seconds", "heard"),
    [
        (0.1, (0, "")),
        (0.2, (0, "It")),
        (0.85, (0, "It")),
        (0.95, (0, "It rains.")),
        (1.5, (1, "Stay")),
        (2.15, (1, "Stay here. ")),
        (2.55, (1, "Stay here. Come")),
        (9.0, (1, "Stay here. Come back. ")),
    ],
)
def test_words_are_heard_when_they_have_been_played(
    seconds: float, heard: tuple[int | None, str]
) -> None:
    clock = Clock()
    playout = played(clock)
    clock.now += seconds
    assert playout.heard() == heard
    clock.now += 60
    assert playout.heard(seconds) == heard


def test_all_words_are_heard_at_the_end_of_the_audio() -> None:
    """Sums of durations are rounded, and differ in their last digits."""
    for samples in range(20_000, 21_600):
        playout, seconds = Playout(Clock()), samples / 24_000
        for text in ("It rains.", " Stay here."):
            playout.begin(text)
            playout.add(0.1, 0.0)
            playout.add(seconds - 0.1, seconds)
        assert playout.heard(2 * samples / 24_000)[1] == "It rains. Stay here."


def test_the_clock_waits_while_the_player_has_no_audio() -> None:
    playout = Playout(clock := Clock())
    playout.begin("one two")
    playout.add(0.3, 0.7)
    clock.now += 5
    assert playout.played_s == pytest.approx(0.3)
    playout.add(0.4, 0.7)
    clock.now += 0.2
    assert playout.played_s == pytest.approx(0.5)


def test_words_without_times_are_estimated_after_those_with_times() -> None:
    playout = Playout(Clock())
    playout.begin("one two three ")
    playout.add(2.4, 2.4)
    playout.align([{"word": "one", "end_ms": 1000}])
    playout.align([{"word": "two", "end_ms": 1200}])
    # The other 7 letters take 1.2 s.
    assert playout.heard(2.1)[1] == "one two"
    assert playout.heard(2.3)[1] == "one two three"


def test_an_aligner_may_know_parts_of_words() -> None:
    playout = Playout(Clock())
    playout.begin("It's 你好. ")
    playout.add(1.0, 1.0)
    parts = [("It", 100), ("s", 200), ("你", 300), ("好", 400)]
    playout.align([{"word": word, "end_ms": end_ms} for word, end_ms in parts])
    heard = [playout.heard(seconds)[1] for seconds in (0.15, 0.25, 0.35, 0.45)]
    assert heard == ["", "It's", "It's 你", "It's 你好"]


def test_the_words_that_were_heard_before_an_interruption() -> None:
    """A player begins with the first audio, and is interrupted at a random time, 100 times."""
    aligner, random, right = PocketsphinxAligner(), np.random.default_rng(0), 0
    for text, path in ((held_out()[0], SENTENCE), (PROMPT_TEXT, PROMPT)):
        recording, rate = soundfile.read(path, dtype="int16")
        samples = np.asarray(soxr.resample(recording, rate, aligner.rate_hz))
        reference = align(aligner, text, samples)
        alignment = aligner.begin(text)
        chunks = np.split(samples, range(8000, len(samples), 8000))  # half a second each
        sent = [(len(chunk) / aligner.rate_hz, alignment.feed(chunk)) for chunk in chunks]
        for _ in range(50):
            played_s = random.uniform(0, len(samples) / aligner.rate_hz)
            playout, sent_s = Playout(Clock()), 0.0
            playout.begin(text)
            for seconds, words in sent:  # the server is at most 0.75 s ahead of the player
                if sent_s > played_s + 0.25:
                    break
                sent_s += seconds
                playout.add(seconds, 0.0)
                playout.align(word.fields for word in words)
            heard = [word.word for word in reference if word.end_s <= played_s]
            right += playout.heard(played_s)[1].split() == heard
    assert right >= 95, right


def test_a_text_of_unknown_length_has_the_pace_of_those_before_it() -> None:
    playout = Playout(Clock())
    playout.begin("one two ", 0)
    playout.add(1.6, 1.6)  # 0.2 s for a letter
    playout.begin("three four five six", 1)
    playout.add(1.0, 0.0)
    assert playout.heard(1.6 + 0.95) == (1, "")
    assert playout.heard(1.6 + 1.0) == (1, "three")


def test_a_language_without_spaces_is_heard_by_characters() -> None:
    playout = Playout(Clock())
    playout.begin("今天下雨")
    playout.add(0.8, 0.8)
    assert playout.heard(0.45)[1] == "今天"


def test_a_player_may_be_later_than_the_clock() -> None:
    playout = Playout(clock := Clock())
    for key, text in enumerate(["one two ", "three ", "four "]):
        playout.begin(text, key)
        playout.add(1.0, 1.0)
        clock.now += 5
    assert playout.heard(0.5) == (0, "one")
    assert playout.heard(1.5) == (1, "")
    assert playout.heard(2.0) == (1, "three ")


def test_texts_that_were_played_are_forgotten() -> None:
    playout = Playout(clock := Clock())
    assert playout.heard() == (None, "")
    for key in range(1000):
        playout.begin("word ", key)
        playout.add(0.5, 0.5)
        clock.now += 1
    assert len(playout._parts) <= 10
    assert playout.heard() == (999, "word ")
