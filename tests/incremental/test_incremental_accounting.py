"""Pages and prompts as numbers: no tensors here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.incremental.rig import a_voice
from tests.support.patience import PATIENCE_SECONDS
from token2wav import Voice
from token2wav.engines.paging import OutOfPagesError, PagePool
from token2wav.engines.prompts import PromptTable, SharedPrompt

VOICES = [a_voice(0, seed) for seed in range(6)]


class Contents:
    """What a table computes and frees: the number of a voice."""

    def __init__(self) -> None:
        self.live: list[int] = []
        self.made = 0

    def compute(self, voice: Voice) -> int:
        self.made += 1
        number = next(index for index, each in enumerate(VOICES) if each.content_hash == voice.content_hash)
        self.live.append(number)
        return number

    def free(self, number: int) -> None:
        self.live.remove(number)


def test_lowest_pages_go_first_and_in_order() -> None:
    pool = PagePool(8)
    assert [pool.acquire(2), pool.acquire(0), pool.acquire(3)] == [[0, 1], [], [2, 3, 4]]
    given_back = [1, 0]
    pool.release(given_back)
    assert given_back == []
    assert pool.acquire(3) == [0, 1, 5]
    assert (pool.used, pool.free) == (6, 2)


def test_too_many_pages_are_refused_and_none_is_taken() -> None:
    pool = PagePool(4)
    pool.acquire(1)
    with pytest.raises(OutOfPagesError, match="4 pages needed, 3 of 4 free; try again later"):
        pool.acquire(4)
    assert pool.acquire(3) == [1, 2, 3]


@settings(derandomize=True, deadline=None)
@given(operations=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_any_use_of_a_pool(operations: list[tuple[bool, int]]) -> None:
    pool, free, owners = PagePool(12), set(range(12)), list[list[int]]()
    for take, number in operations:
        if take and number > len(free):
            with pytest.raises(OutOfPagesError):
                pool.acquire(number)
        elif take:
            owners.append(pool.acquire(number))
            assert owners[-1] == sorted(free)[:number]
            free -= set(owners[-1])
        elif owners:
            pages = owners.pop(number % len(owners))
            free |= set(pages)
            pool.release(pages)
            assert pages == []
        assert (pool.free, pool.used) == (len(free), 12 - len(free))


def test_pool_used_by_many_threads() -> None:
    pool = PagePool(40)
    start = threading.Barrier(8)

    def work(_: int) -> None:
        start.wait(timeout=PATIENCE_SECONDS)
        for count in (1, 2, 3, 4, 5) * 40:
            pages = pool.acquire(count)
            assert len(set(pages)) == count
            pool.release(pages)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert pool.acquire(40) == list(range(40))


def test_least_recently_used_prompt_goes_first() -> None:
    contents = Contents()
    table = PromptTable(contents.compute, contents.free)
    for index in (0, 1, 2, 0):
        table.release(table.acquire(VOICES[index]))
    assert contents.made == 3
    for left in ([2, 0], [0], []):
        assert table.evict()
        assert sorted(contents.live) == sorted(left)
    assert not table.evict()


def test_prompt_in_use_is_not_evicted() -> None:
    contents = Contents()
    table = PromptTable(contents.compute, contents.free, most=0)
    first, again = table.acquire(VOICES[0]), table.acquire(VOICES[0])
    assert first is again
    table.release(first)
    assert not table.evict()
    assert (contents.live, table.referenced) == ([0], 1)
    table.release(again)
    assert (contents.live, table.referenced, len(table)) == ([], 0, 0)


def test_most_prompts_that_are_kept() -> None:
    contents = Contents()
    table = PromptTable(contents.compute, contents.free, most=2)
    used = table.acquire(VOICES[5])  # does not count
    for index in range(5):
        table.release(table.acquire(VOICES[index]))
    assert sorted(contents.live) == [3, 4, 5]
    table.release(used)
    assert len(contents.live) == 2


@settings(derandomize=True, deadline=None)
@given(operations=st.lists(st.tuples(st.sampled_from("aaare"), st.integers(0, 5)), max_size=60))
def test_any_use_of_a_prompt_table(operations: list[tuple[str, int]]) -> None:
    contents = Contents()
    table = PromptTable(contents.compute, contents.free)
    held: list[tuple[int, SharedPrompt[int]]] = []
    order: list[int] = []  # of last use
    for operation, number in operations:
        if operation == "a":
            held.append((number, table.acquire(VOICES[number])))
            order = [each for each in order if each != number] + [number]
            assert held[-1][1].content == number
        elif operation == "r" and held:
            table.release(held.pop(number % len(held))[1])
        elif operation == "e":
            idle = [each for each in order if each not in {holder for holder, _ in held}]
            assert table.evict() == bool(idle)
            order = [each for each in order if each not in idle[:1]]
        assert sorted(contents.live) == sorted(order)
        assert len(table) == len(order)
        assert table.referenced == len({holder for holder, _ in held})
        assert table.computed == contents.made


def test_twenty_threads_compute_once() -> None:
    contents, start = Contents(), threading.Barrier(20)
    table = PromptTable(contents.compute, contents.free)

    def acquire(_: int) -> SharedPrompt[int]:
        start.wait(timeout=PATIENCE_SECONDS)
        return table.acquire(VOICES[0])

    with ThreadPoolExecutor(20) as threads:
        prompts = list(threads.map(acquire, range(20)))
    assert (contents.made, len(set(map(id, prompts))), prompts[0].references) == (1, 1, 20)


def test_failing_compute_leaves_the_table_usable() -> None:
    fails = [True, False]

    def compute(voice: Voice) -> int:
        if fails.pop(0):
            raise RuntimeError("it broke")
        return 1

    table = PromptTable(compute, lambda content: None)
    with pytest.raises(RuntimeError, match="it broke"):
        table.acquire(VOICES[0])
    assert (len(table), table.referenced, table.computed) == (0, 0, 0)
    assert table.acquire(VOICES[0]).content == 1
    assert (len(table), table.referenced, table.computed) == (1, 1, 1)
