"""Tokens from text: any cut gives the same tokens, and errors name the position of other text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from token2wav_client.errors import TokenError
from token2wav_client.tokens import MAX_TOKEN, TokenParser, as_batches, as_tokens

TOKENS = st.lists(st.integers(0, MAX_TOKEN), max_size=30)
SEPARATORS = st.sampled_from([b" ", b"\n", b", ", b"\t\r\n", b",,"])


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], bytes]:
    """Draws tokens, and a text with these tokens in a mixture of both notations."""
    tokens = draw(TOKENS)
    text = b""
    for token in tokens:
        bracketed = draw(st.booleans())
        gap = draw(SEPARATORS) if not bracketed or draw(st.booleans()) else b""
        text += (b"<|s_%d|>" % token if bracketed else b"%d" % token) + gap
    return tokens, text


def cut(text: bytes, positions: list[int]) -> list[bytes]:
    edges = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def parse(pieces: list[bytes]) -> list[int]:
    parser = TokenParser()
    tokens = [token for piece in pieces for token in parser.feed(piece)]
    return tokens + parser.close()


@given(texts(), st.lists(st.integers(0, 10_000), max_size=20))
def test_any_cut_gives_the_same_tokens(case: tuple[list[int], bytes], places: list[int]) -> None:
    tokens, text = case
    assert parse(cut(text, places)) == tokens


@given(st.binary(max_size=40), st.lists(st.integers(0, 10_000), max_size=10))
def test_any_bytes_give_the_same_outcome_however_cut(text: bytes, places: list[int]) -> None:
    def outcome(pieces: list[bytes]) -> list[int] | str:
        try:
            return parse(pieces)
        except TokenError as error:
            # the excerpt may be shorter
            return str(error).partition(" at byte ")[2].partition(" ")[0]

    assert outcome(cut(text, places)) == outcome([text])


def test_a_bracketed_token_is_there_with_its_last_byte() -> None:
    parser = TokenParser()
    assert parser.feed(b"<|s_12|") == []
    assert parser.feed(b">") == [12]


def test_a_plain_integer_is_complete_at_its_separator() -> None:
    parser = TokenParser()
    assert parser.feed(b"1 23") == [1]
    assert parser.feed(b"4") == []
    assert parser.feed(b"\n") == [234]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        (b"1 2 x", 4),
        (b"<|s_1|> <|x 2|>", 8),
        (b"<|s_1|> <|speech_x|>", 8),
        (b"<|s_1|><x>", 7),
        (b"<||>", 0),
        (b"<|" + b"x" * 65 + b"|>", 0),
        (b"7 \xef\xbb ", 2),
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


def test_skipped_special_tokens_and_byte_order_marks() -> None:
    text = (
        b"\xef\xbb\xbf<|endofprompt|><|s_12|>7\xef\xbb\xbf<|im_end|>\n"
        b"<|zh|><|speech_3|> <|s|><|0.00|>42"
    )
    for size in range(1, 40):
        parser = TokenParser()
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        tokens = [token for part in parts for token in parser.feed(part)]
        assert tokens + parser.close() == [12, 7, 3, 42]
        assert (parser.skipped, parser.first_skipped) == (7, "a byte-order mark")


def test_a_special_token_is_shown_as_a_message_can_hold_it() -> None:
    parser = TokenParser()
    parser.feed(b"<|\x1b[31m\xff|><|other|>")
    assert (parser.skipped, parser.first_skipped) == (2, r"'<|\x1b[31m\\xff|>'")


@pytest.mark.parametrize(
    "text", [b"<", b"<|s_1", b"<|s_1|", b"3 <|s_", b"<|endof", b"<|endofprompt|", b"\xef\xbb"]
)
def test_an_end_within_a_token_is_an_error(text: bytes) -> None:
    with pytest.raises(TokenError, match="ends inside"):
        parse([text])


@pytest.mark.parametrize("values", [[1, 2], (3,), np.array([4], np.uint8), range(5), []])
def test_integers_become_int32(values: object) -> None:
    tokens = as_tokens(values)  # type: ignore[arg-type]
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(values)  # type: ignore[call-overload]


def test_numbers_in_rows_become_latents() -> None:
    latents = as_tokens([[0.5, -2.0], [1.0, 3.0]])
    assert latents.dtype == np.float32
    assert latents.tolist() == [[0.5, -2.0], [1.0, 3.0]]
    assert as_tokens(np.zeros((0, 3))).dtype == np.float32
    assert as_tokens(torch.tensor([[0.5, -2.0]]).bfloat16()).tolist() == [[0.5, -2.0]]
    for wrong in (np.nan, np.inf, 1e39):  # 1e39 does not fit float32
        with pytest.raises(TokenError, match="latents: hold NaN or infinite values"):
            as_tokens([[1.0, wrong]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([-1], "-1 is outside"),
        ([MAX_TOKEN + 1], "2147483648 is outside"),
        ([1.5], "float64"),
        ([True], "bool"),
        ([[[1]]], r"shape \(1, 1, 1\)"),
        (7, r"shape \(\), .*; pass batches of tokens, such as \[7\]$"),
        ("<|s_1|>", "^tokens: str, expected integers; use TokenParser for text$"),
        (b"1 2", "^tokens: bytes, expected integers"),
        ([[1], [2, 3]], "^tokens: rows of different lengths$"),
        ([[1], 2], "^tokens: rows of different lengths$"),
        (["1"], "dtype"),
        ([2**64], "18446744073709551616 is outside"),
        ([[1, 2**64], [1, 2]], "18446744073709551616 is outside"),
        ([-(2**64), 1], "-18446744073709551616 is outside"),
        ([10**5000], "a number of more than 20 digits is outside"),
        ([2**64, None], "dtype object"),
    ],
)
def test_invalid_token_lists_are_refused(values: object, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        as_tokens(values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tokens", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), [np.int64(1), np.int64(2)]]
)
def test_flat_tokens_are_a_single_batch(tokens: Any) -> None:
    assert [as_tokens(batch).tolist() for batch in as_batches(tokens)] == [[1, 2]]


def test_a_source_is_not_asked_before_its_batches_are_taken() -> None:
    source = iter([[1]])
    assert as_batches(source) is source
    assert next(source) == [1]
