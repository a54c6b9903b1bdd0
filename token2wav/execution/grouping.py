"""Grouping of items that a network can compute together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def groups_of(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[list[int]]:
    """Groups the indices of items with equal keys, in the order of their first items."""
    groups: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(key(item), []).append(index)
    return list(groups.values())


def map_grouped(
    items: Sequence[Item],
    key: Callable[[Item], Hashable],
    run: Callable[[list[Item]], Sequence[Result]],
) -> list[Result]:
    """Computes the results of all items, in their order. `run` gets items with equal keys, and
    returns one result for each.
    """
    results: dict[int, Result] = {}
    for members in groups_of(items, key):
        results.update(zip(members, run([items[index] for index in members]), strict=True))
    return [results[index] for index in range(len(items))]
