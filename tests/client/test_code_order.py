"""Codes of several codebooks in one order: those of the server, and inputs that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from token2wav.families.snac import SnacSizes
from token2wav_client import TokenError, flatten_codebooks


def test_the_order_of_orpheus() -> None:
    codes = flatten_codebooks([[1, 2], [11, 12, 13, 14], [21, 22, 23, 24, 25, 26, 27, 28]])
    assert codes.dtype == np.int32
    assert codes.tolist() == [[1, 11, 21, 22, 12, 23, 24], [2, 13, 25, 26, 14, 27, 28]]


@pytest.mark.parametrize("strides", [(4, 2, 1), (8, 4, 2, 1), (4, 1), (3,), (6, 2)])
def test_the_server_assigns_codes_to_the_same_places(strides: tuple[int, ...]) -> None:
    """Codes are numbered by codebook and latent, so that each names its place."""
    tokens, latents = 3, strides[0]
    books = [
        np.arange(0, tokens * latents, stride)[None] + 1000 * number
        for number, stride in enumerate(strides)
    ]
    flat = flatten_codebooks(books)
    sizes = SnacSizes(vq_strides=strides, attn_window_size=None)
    assert flat.shape == (tokens, sizes.codes)
    for number, (stride, places) in enumerate(zip(strides, sizes.code_places(), strict=True)):
        expected = np.arange(tokens * latents) // stride * stride + 1000 * number
        np.testing.assert_array_equal(flat[:, places].ravel(), expected)


@pytest.mark.parametrize(
    ("books", "message"),
    [
        ([], "expected a list of codes for each codebook"),
        ([[1, 2], [3, 4, 5]], r"\[2, 3\] codes in the codebooks"),
        ([[1, 2], [3, 4], []], r"\[2, 2, 0\] codes in the codebooks"),
        ([[1], [1, 2], [1, 2, 3]], r"\[1, 2, 3\] codes in the codebooks"),
        ([[[1, 2], [3, 4]]], "expected a list of codes for each codebook"),
        ([[0.5]], "tokens"),
    ],
)
def test_codes_that_are_refused(books: Any, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        flatten_codebooks(books)
