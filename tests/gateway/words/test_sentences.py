"""Sentences and clauses of a text that arrives in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token2wav_gateway.words.sentences import Granularity, SentenceSplitter

# Marks and words that make ends of sentences uncertain.
WORDS = ["It", "rains", "Dr.", "No.", "M.", "3.", "3.5", "e.g.", "Mai", '"Yes!"', "(a", "b.)", "c;"]
WORDS += ["你好。", "「はい。」", "，", "…", "?", "\n", "“A.", "B.”", "„C.", "D.“", "x" * 30]


def split(
    text: str,
    size: int,
    granularity: Granularity = "sentence",
    language: str = "en",
    longest: int = 1000,
) -> list[str]:
    splitter, sentences = SentenceSplitter(longest, granularity, language), []
    for at in range(0, len(text), size):
        sentences += splitter.feed(text[at : at + size])
    sentences += splitter.close()
    assert splitter.empty
    return sentences


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("en", ["Dr. Smith met Mr. Jones at 3.5 p.m. on Jan. 5.", "He paid $3.50.", "No end"]),
        ("en", ["No. 5 is alive.", "The U.S. Army came.", "J. R. R. Tolkien wrote it."]),
        ("en", ["It rains.", '"Take 3.5 coats!" she said.', "Visit example.com… now.", "Why?"]),
        ("de", ["Das kostet ca. 3,5 Euro.", "Am 5. Mai kam Dr. Ott.", "Die 3. Tür.", "„A. B.“"]),
        ("fr", ["M. Dupont a 3,5 €.", "Ça va ?", "Oui !"]),
        ("fr", ["Est-ce le plan B\u202f?", "Ou le plan\u00a0C\u3000."]),
        ("es", ["El Sr. López llegó.", "¿Qué tal?", "¡Bien!"]),
        ("ru", ["Г. Иванов пришёл.", "Да."]),
        ("hi", ["यह है।", "वह गया।"]),
        ("zh", ["价格是3.5元。", "天气很好！", "你呢？", "“好的。”", "他说。"]),
        ("ja", ["今日は。", "元気ですか？", "「はい。」", "と言った。"]),
    ],
)
def test_points_of_abbreviations_and_numbers_end_no_sentence(
    language: str, sentences: list[str], size: int
) -> None:
    between = "" if language in ("zh", "ja") else " "
    assert split(between.join(sentences), size, language=language) == sentences


def test_clauses() -> None:
    text = "Well, I think so, at 10:30, with 3,5 kg; or not. 你好，今天天气很好，我们出去吧。"
    expected = ["Well, I think so,", "at 10:30, with 3,5 kg;", "or not."]
    expected += ["你好，今天天气很好，", "我们出去吧。"]
    assert split(text, 1, "clause") == expected
    assert split(text, 1, "none") == [text]


def test_a_sentence_is_released_when_its_end_is_certain() -> None:
    splitter = SentenceSplitter(1000)
    assert splitter.feed("It rains.") == []
    assert splitter.feed(" ") == ["It rains."]
    assert splitter.feed("At 5 p.m. ") == []
    assert splitter.feed("on Monday? ") == ["At 5 p.m. on Monday?"]
    splitter = SentenceSplitter(1000, language="de")
    assert splitter.feed("Er kam am 5. M") == []
    assert splitter.feed("ai. Dan") == []
    assert splitter.feed("n ") == ["Er kam am 5. Mai."]
    assert splitter.feed("schneite es.\n") == ["Dann schneite es."]  # a line break is certain
    assert splitter.empty
    assert splitter.feed("好。") + splitter.feed("”") == []
    assert splitter.feed("他") == ["好。”"]


@given(
    st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join),
    st.integers(1, 40),
    st.sampled_from(["none", "sentence", "clause"]),
    st.sampled_from(["en", "de", "zh"]),
    st.integers(10, 100),
)
def test_sentences_do_not_depend_on_the_pieces(
    text: str, size: int, granularity: Granularity, language: str, longest: int
) -> None:
    sentences = split(text, size, granularity, language, longest)
    assert sentences == split(text, 1, granularity, language, longest)
    assert all(len(sentence) <= longest for sentence in sentences)
    # Nothing is lost but marks without words.
    letters = [letter for letter in text if letter.isalnum()]
    assert [letter for part in sentences for letter in part if letter.isalnum()] == letters


def test_a_sentence_without_words_is_dropped() -> None:
    splitter = SentenceSplitter(1000)
    assert splitter.feed("---\n... \N{THUMBS UP SIGN}\n3.\n") == ["3."]
    assert splitter.feed("”") + splitter.close() == []


def test_a_sentence_without_an_end_is_cut() -> None:
    splitter = SentenceSplitter(20)
    sentences = splitter.feed("word " * 50) + splitter.close()
    assert all(len(sentence) <= 20 for sentence in sentences)
    assert " ".join(sentences).split() == ["word"] * 50
    assert max(map(len, SentenceSplitter(20).feed("x" * 100))) == 20
