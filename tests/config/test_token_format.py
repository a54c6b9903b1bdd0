"""Format of tokens: what its constructors state, and the tokens of a call that fit it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from token2wav import InputError
from token2wav.config.token_format import NO_CODE, TokenFormat

NUMBERS, CODES, LATENTS = (
    TokenFormat.numbers(6561),
    TokenFormat.codes(3, 16, fewer=True),
    TokenFormat.latents(64),
)
UNEVEN = TokenFormat.uneven_codes((4096, 1024))


def test_codes_of_fewer_codebooks_are_padded() -> None:
    checked = CODES.checked([[1, 2]])
    assert checked.tolist() == [[1, 2, NO_CODE]]
    assert checked.dtype == np.int32
    assert CODES.checked([]).shape == (0, 3)


def test_the_codes_of_a_prompt_have_the_shape_of_the_tokens() -> None:
    for prompt in ([1, 2], [[1, 2]]):
        with pytest.raises(
            InputError, match=r"^prompt_tokens: shape \(.*\), expected \(tokens, 3\)"
        ):
            CODES.check_prompt(np.array(prompt, np.int32))


@pytest.mark.parametrize(
    ("tokens", "values", "message"),
    [
        (NUMBERS, [0, 6561], "6561 at index 1 is outside the vocabulary 0 to 6560"),
        (NUMBERS, [1 << 40], f"values do not fit 32 bits; found {1 << 40} to {1 << 40}"),
        (NUMBERS, np.array([(1 << 32) + 5]), "values do not fit 32 bits; found .*"),  # else 5
        (NUMBERS, [1 << 70], "values do not fit 32 bits"),
        (NUMBERS, [10**5000], "values do not fit 32 bits"),
        (NUMBERS, np.zeros((1, 5), np.int32), r"shape \(1, 5\), expected one dimension"),
        *(
            (NUMBERS, no_list, r"shape \(\), expected one dimension")
            for no_list in (5, "123", None)
        ),
        (NUMBERS, np.ones(2, np.float32), "type float32, expected integers"),
        (NUMBERS, [float("nan")], "type float64, expected integers"),
        (NUMBERS, [True], "type bool, expected integers"),
        (NUMBERS, ["1", "2"], "type <U1, expected integers"),
        (CODES, [[0, 16]], "16 at index 0, codebook 1, is outside the vocabulary 0 to 15"),
        (
            UNEVEN,
            [[4095, 1024]],
            "1024 at index 0, codebook 1, is outside the vocabulary 0 to 1023",
        ),
        (CODES, [1], r"shape \(1,\), expected \(tokens, codebooks\) with 1 to 3 codebooks"),
        (UNEVEN, [[1]], r"shape \(1, 1\), expected \(tokens, 2\), 2 codes for each"),
        (LATENTS, [[1.0]], r"shape \(1, 1\), expected \(latents, 64\)"),
    ],
)
def test_tokens_that_are_refused(tokens: TokenFormat, values: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{tokens.field}: {message}$"):
        tokens.checked(values)
