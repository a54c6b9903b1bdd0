"""Table of `token2wav bench` for several models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.bench_table import as_markdown, keeps_up
from token2wav_client.bench import figures
from token2wav_client.listening import Recording, record

RATE = 8000


def stream(*arrivals_s: float, complete: bool = True) -> Recording:
    """Returns an utterance of chunks of a second."""
    chunks = [(arrival_s, np.zeros(RATE, np.int16)) for arrival_s in arrivals_s]
    return record(chunks, RATE, arrivals_s[-1], complete=complete)


@pytest.mark.parametrize(
    ("recordings", "keeps"),
    [
        ([stream(0.5, 1.0), stream(0.6, 1.2)], True),
        ([stream(0.5, 2.5), stream(0.6, 2.5)], False),  # slower than speech
        ([stream(0.1, 1.5, 1.6, 1.7), stream(0.1, 0.2, 0.3, 0.4)], False),  # a stall of 400 ms
        ([stream(0.5), stream(0.6)], True),  # one chunk each, for which there is no C200
    ],
)
def test_a_row_keeps_up_if_it_is_faster_than_speech_and_without_stalls(
    recordings: list[Recording], keeps: bool
) -> None:
    assert keeps_up(figures(len(recordings), recordings)) is keeps


def test_the_table_says_what_the_machine_cannot_do() -> None:
    rows: list[dict[str, Any]] = [
        figures(1, [stream(0.5, 1.0)]),
        figures(4, [stream(2.0, complete=False)] * 4),
    ]
    assert as_markdown({"mimi": {"rows": rows}}).splitlines()[2:] == [
        "| Mimi | 1 | 500, 500, 500, 500, 500 | 500, 500, 500, 500, 500 | 2.0 | 100%, 100%, 100% | "
        "0 (0) | yes |",
        "| Mimi | 4 | 2000, 2000, 2000, 2000, 2000 | - | 2.0 | -, -, - | 4 (0) | no |",
    ]
