"""Results are in the order of their items, for any grouping of the computation."""

from __future__ import annotations

import pytest

from token2wav.execution.grouping import groups_of, map_grouped


def test_groups_appear_in_the_order_of_their_first_items() -> None:
    assert groups_of(["bb", "a", "cc", "d"], len) == [[0, 2], [1, 3]]
    assert groups_of([], len) == []


def test_results_come_back_in_order() -> None:
    seen: list[list[int]] = []

    def run(items: list[int]) -> list[int]:
        seen.append(items)
        return [10 * item for item in items]

    assert map_grouped([3, 2, 5, 4], lambda item: item % 2, run) == [30, 20, 50, 40]
    assert seen == [[3, 5], [2, 4]]


def test_a_run_must_answer_for_every_item() -> None:
    with pytest.raises(ValueError, match="shorter"):
        map_grouped([1, 2], lambda item: 0, lambda items: items[:1])
