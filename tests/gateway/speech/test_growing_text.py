"""Text that is passed on word by word."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token2wav_gateway.speech.growing_text import GrowingText, WordFeeder


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
    assert all(0 < len(text) <= longest for text in texts)
    joined = "".join(texts)
    assert whole.startswith(joined)
    assert not any(letter.isalnum() for letter in whole[len(joined) :])


@pytest.mark.parametrize("ends_early", [False, True])
def test_the_rest_of_a_text_arrives_in_pieces(ends_early: bool) -> None:
    async def work() -> list[str]:
        text = GrowingText("one ")
        text.add("two ")
        rest, received = text.rest("one "), []
        received.append(await anext(rest))
        if not ends_early:
            following = asyncio.ensure_future(anext(rest, ""))
            await asyncio.sleep(0)
            assert not following.done()
            text.add("three")
            received.append(await following)
        text.end()
        return [*received, *[piece async for piece in rest]]

    assert asyncio.run(work()) == (["two "] if ends_early else ["two ", "three"])
