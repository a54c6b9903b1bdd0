"""Codes of several codebooks: rows in a delay pattern become frames, and lists become one order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token2wav.families.snac import SnacSizes
from token2wav_client import CodeAligner, TokenError, flatten_codebooks

START, END = 1024, 1025
HIGGS, DIA = tuple(range(8)), (0, 8, 9, 10, 11, 12, 13, 14, 15)


def some_frames(count: int, codebooks: int) -> Any:
    return np.random.default_rng(count).integers(0, 1024, (count, codebooks)).astype(np.int32)


def delayed(frames: Any, delays: tuple[int, ...]) -> Any:
    """Returns the rows that a language model emits: a row of starts, the pattern, and ends."""
    rows = np.full((len(frames) + max(delays) + 2, len(delays)), END, np.int32)
    for k, delay in enumerate(delays):
        rows[: delay + 1, k] = START
        rows[delay + 1 : delay + 1 + len(frames), k] = frames[:, k]
    return rows


@given(st.sampled_from([HIGGS, DIA, (0,)]), st.integers(0, 30), st.lists(st.integers(0, 60)))
def test_any_cut_gives_the_frames(delays: tuple[int, ...], count: int, places: list[int]) -> None:
    frames = some_frames(count, len(delays))
    aligner = CodeAligner(delays)
    parts = [aligner.feed(rows) for rows in np.split(delayed(frames, delays), sorted(places))]
    np.testing.assert_array_equal(np.concatenate(parts), frames)
    assert all(part.dtype == np.int32 for part in parts)
    assert aligner.ended == (count > 0)  # without a code there is no end after the start
    assert not len(aligner.feed(np.zeros((20, len(delays)), int))) or not count


def test_a_frame_is_returned_with_its_last_code() -> None:
    frames = some_frames(3, 8)
    aligner = CodeAligner()
    counts = [len(aligner.feed(row)) for row in delayed(frames, HIGGS)]
    assert counts == [0] * 8 + [1, 1, 1] + [0]


def test_a_mark_inside_a_frame_is_the_highest_code() -> None:
    rows = delayed(some_frames(4, 8), HIGGS)
    rows[3, 1] = END
    assert CodeAligner().feed(rows)[1, 1] == 1023


@pytest.mark.parametrize("rows", [[1, 2], [[1] * 9], [[0.5] * 8], [[-1] * 8]])
def test_rows_that_are_refused(rows: Any) -> None:
    with pytest.raises(TokenError, match="tokens"):
        CodeAligner().feed(rows)


@pytest.mark.parametrize("delays", [(), (1, 0), (0, -1)])
def test_delays_that_are_refused(delays: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the first must be 0"):
        CodeAligner(delays)


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
