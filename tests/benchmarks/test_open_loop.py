"""Search of the open loop for the highest rate without gaps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.open_loop import LABELS, as_table_row, highest_rate, next_rate


def result(rate: float, free_of_gaps: bool) -> dict[str, Any]:
    times = {"p50": 20.0 * rate, "p99": 30.0 * rate}
    return {
        "model": "mimi",
        "utterances_per_s": rate,
        "utterances": 8,
        "complete": 8,
        "first_playable_ms": times,
        "gap_free_start_ms": times,
        "buffer_50": 0.5,
        "buffer_100": 0.75,
        "buffer_200": 1.0 if free_of_gaps else 0.875,
        "scheduling_lag_ms": {"p50": 0.0, "p99": 1.0},
    }


@pytest.mark.parametrize(
    ("limit", "measured", "highest"),
    [
        (3.0, [1.0, 2.0, 4.0], 2.0),
        (9.0, [1.0, 2.0, 4.0], 4.0),
        (0.3, [1.0, 0.5, 0.25], 0.25),
        (0.0, [1.0, 0.5, 0.25, 0.125], None),
    ],
)
def test_rates_rise_until_one_has_gaps_or_fall_until_none_has(
    limit: float, measured: list[float], highest: float | None
) -> None:
    rows: list[dict[str, Any]] = []
    while (rate := next_rate([4.0, 1.0, 2.0], rows)) is not None:
        rows.append(result(rate, rate <= limit))
    assert [row["utterances_per_s"] for row in rows] == measured
    assert highest_rate(rows) == highest


def test_a_row_of_the_table_has_the_figures_of_the_lowest_rate() -> None:
    rows = [result(0.5, True), result(1.0, False)]
    assert (
        as_table_row(rows)
        == f"| {LABELS['mimi']} | 0.5 | 10 / 15 ms | 10 / 15 ms | 50 / 75 / 100 % |"
    )
