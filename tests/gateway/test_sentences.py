"""Sentences of a text that arrives in pieces."""

from __future__ import annotations

import pytest

from token2wav_gateway.sentences import SentenceSplitter

TEXT = 'It rains. "Take 3.5 coats!" she said… 你好。再见！\nNo end'
SENTENCES = ["It rains.", '"Take 3.5 coats!"', "she said…", "你好。", "再见！", "No end"]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_sentences_do_not_depend_on_the_pieces(size: int) -> None:
    splitter, sentences = SentenceSplitter(1000), []
    for at in range(0, len(TEXT), size):
        sentences += splitter.feed(TEXT[at : at + size])
    sentences += splitter.close()
    assert sentences == SENTENCES
    assert splitter.close() == []


def test_a_sentence_without_words_is_dropped() -> None:
    splitter = SentenceSplitter(1000)
    assert splitter.feed("---\n... \N{THUMBS UP SIGN}\n3. ") == ["3."]
    assert splitter.feed("”") + splitter.close() == []


def test_a_sentence_without_an_end_is_cut() -> None:
    splitter = SentenceSplitter(20)
    sentences = splitter.feed("word " * 50) + splitter.close()
    assert all(len(sentence) <= 20 for sentence in sentences)
    assert " ".join(sentences).split() == ["word"] * 50
    assert max(map(len, SentenceSplitter(20).feed("x" * 100))) == 20
