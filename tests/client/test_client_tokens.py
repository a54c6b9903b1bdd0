"""Tokens from text: any cut gives the same tokens, and what is no token is named with its position."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token2wav_client.errors import TokenError
from token2wav_client.tokens import MAX_TOKEN, TokenParser, as_tokens

TOKENS = st.lists(st.integers(0, MAX_TOKEN), max_size=30)
SEPARATORS = st.sampled_from([b" ", b"\n", b", ", b"\t\r\n", b",,"])


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], bytes]:
    """Tokens, and a text that spells them in a mixture of both ways."""
    tokens = draw(TOKENS)
    text = b""
    for token in tokens:
        bracketed = draw(st.booleans())
        gap = draw(SEPARATORS) if not bracketed or draw(st.booleans()) else b""
        text += (b"<|s_%d|>" % token if bracketed else b"%d" % token) + gap
    return tokens, text


def cut(text: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def parse(pieces: list[bytes]) -> list[int]:
    parser = TokenParser()
    tokens = [token for piece in pieces for token in parser.feed(piece)]
    return tokens + parser.close()


@given(texts(), st.lists(st.integers(0, 10_000), max_size=20))
def test_any_cut_gives_the_same_tokens(case: tuple[list[int], bytes], places: list[int]) -> None:
    tokens, text = case
    assert parse(cut(text, places)) == tokens


@given(texts())
def test_byte_by_byte_gives_the_same_tokens(case: tuple[list[int], bytes]) -> None:
    tokens, text = case
    assert parse([text[i : i + 1] for i in range(len(text))]) == tokens


@given(st.binary(max_size=40), st.lists(st.integers(0, 10_000), max_size=10))
def test_any_bytes_give_the_same_outcome_however_cut(text: bytes, places: list[int]) -> None:
    def outcome(pieces: list[bytes]) -> list[int] | str:
        try:
            return parse(pieces)
        except TokenError as error:
            return str(error).partition(" at byte ")[2].partition(" ")[0]  # the excerpt may be shorter

    assert outcome(cut(text, places)) == outcome([text])


def test_a_bracketed_token_is_there_with_its_last_byte() -> None:
    parser = TokenParser()
    assert parser.feed(b"<|s_12|") == []
    assert parser.feed(b">") == [12]


def test_a_plain_integer_needs_what_follows_it() -> None:
    parser = TokenParser()
    assert parser.feed(b"1 23") == [1]
    assert parser.feed(b"4") == []
    assert parser.feed(b"\n") == [234]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        (b"1 2 x", 4),
        (b"<|s_1|> <|x_2|>", 8),
        (b"<|s_1|><|s_-2|>", 7),
        (b"-1", 0),
        (b"1.5", 0),
        (b"12345678901", 0),
        (b"7 4294967296 ", 2),
        (b"<|s_|>", 0),
        (b"[1, 2]", 0),
    ],
)
def test_garbage_is_named_with_its_position(text: bytes, position: int) -> None:
    with pytest.raises(TokenError, match=f"byte {position}\\b"):
        parse([text])


def test_positions_count_from_the_beginning_of_the_stream() -> None:
    parser = TokenParser()
    parser.feed(b"<|s_1|>" * 10)
    with pytest.raises(TokenError, match="'oops' at byte 70 "):
        parser.feed(b"oops")


@pytest.mark.parametrize("text", [b"<", b"<|s_1", b"<|s_1|", b"3 <|s_"])
def test_an_end_within_a_token_is_an_error(text: bytes) -> None:
    with pytest.raises(TokenError, match="ends within"):
        parse([text])


@pytest.mark.parametrize("values", [[1, 2], (3,), np.array([4], np.uint8), range(5), []])
def test_integers_become_int32(values: object) -> None:
    tokens = as_tokens(values)  # type: ignore[arg-type]
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(values)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([-1], "-1 is outside"),
        ([MAX_TOKEN + 1], "2147483648 is outside"),
        ([1.5], "float64"),
        ([True], "bool"),
        ([[[1]]], r"shape \(1, 1, 1\)"),
        (7, r"shape \(\)"),
        ([[1], [2, 3]], "not a list"),
        (["1"], "dtype"),
        ([10**30], "dtype object"),
    ],
)
def test_what_is_no_token_list_is_refused(values: object, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        as_tokens(values)  # type: ignore[arg-type]
