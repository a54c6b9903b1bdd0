"""Codes in a delay pattern: any cut of the rows gives the frames, as soon as they are complete."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token2wav_client import CodeAligner, TokenError

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
