"""Text that is passed on word by word."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token2wav_gateway.speech.growing_text import GrowingText, WordFeeder
from token2wav_gateway.words.sentences import has_words


def fed(pieces: list[str], longest: int = 1000) -> list[str]:
    feeder = WordFeeder(longest)
    texts = [text for piece in pieces for text in feeder.feed(piece)]
    texts += feeder.close()
    return [text.text for text in texts]


def test_a_word_is_passed_on_when_it_is_complete() -> None:
    feeder = WordFeeder(1000)
    assert feeder.feed("... It") == []  # no word is complete
    [text] = feeder.feed(" rai")
    assert text.text == "... It "
    assert feeder.feed("ns to") == []
    assert text.text == "... It rains "
    assert feeder.close() == []
    assert text.text == "... It rains to"
    [other] = feeder.feed("你好")
    assert other.text == "你好"


@given(st.lists(st.text("a .你\n", max_size=8), max_size=8), st.integers(1, 12))
def test_texts_are_the_whole_text(pieces: list[str], longest: int) -> None:
    whole, texts = "".join(pieces), fed(pieces, longest)
    assert all(0 < len(text) <= longest and has_words(text) for text in texts)
    letters = [letter for letter in whole if letter.isalnum()]
    assert [letter for text in texts for letter in text if letter.isalnum()] == letters
    end = 0
    for text in texts:  # only marks are left out
        start = whole.index(text, end)
        assert not has_words(whole[end:start])
        end = start + len(text)


def test_a_text_ends_between_words_if_it_can() -> None:
    assert fed(["one two thr", "ee"], 9) == ["one two ", "three"]
    assert fed(["one abcdefghijkl"], 9) == ["one ", "abcdefghi", "jkl"]
    assert fed(["- - - - - one"], 9) == ["- one"]


@pytest.mark.parametrize("piece", ["a" * 256, "- " * 128, "." * 256])
def test_little_is_held_of_text_without_an_end(piece: str) -> None:
    feeder = WordFeeder(1000)
    texts = [text.text for _ in range(1000) for text in feeder.feed(piece)]
    assert len(feeder._word) <= 1000
    assert len(feeder._marks) <= 1000
    assert len(texts) == (256 if has_words(piece) else 0)


@pytest.mark.parametrize("bound", ["pause_s", "longest_s"])
def test_a_text_without_words_is_ended(bound: str) -> None:
    async def work() -> list[str]:
        text = GrowingText("one two ")
        received = [piece async for piece in text.rest("one ", **{bound: 0.05})]
        assert text.ended
        return received

    assert asyncio.run(work()) == ["two "]
