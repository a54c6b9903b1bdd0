"""Playout: the text that was heard, by the clock of a player or by what the client says."""

from __future__ import annotations

import pytest

from token2wav_gateway.speech.playout import Playout


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


def test_the_clock_waits_while_the_player_has_no_audio() -> None:
    playout = Playout(clock := Clock())
    playout.begin("one two")
    playout.add(0.3, 0.7)
    clock.now += 5
    assert playout.played_s == pytest.approx(0.3)
    playout.add(0.4, 0.7)
    clock.now += 0.2
    assert playout.played_s == pytest.approx(0.5)


def test_times_of_words_replace_the_estimate() -> None:
    playout = Playout(Clock())
    playout.begin("a a loooong b")
    playout.add(4.0, 4.0)
    words = [("a", 100), ("a", 200), ("loooong", 300), ("b", 3900)]
    playout.align([{"word": word, "end_ms": end_ms} for word, end_ms in words])
    assert [playout.heard(seconds)[1] for seconds in (0.15, 0.25, 0.35, 3.8, 4.0)] == [
        "a",
        "a a",
        "a a loooong",
        "a a loooong",
        "a a loooong b",
    ]


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


def test_texts_that_were_played_are_forgotten() -> None:
    playout = Playout(clock := Clock())
    assert playout.heard() == (None, "")
    for key in range(1000):
        playout.begin("word ", key)
        playout.add(0.5, 0.5)
        clock.now += 1
    assert len(playout._parts) <= 2
    assert playout.heard() == (999, "word ")
