"""Accounting of blocks and prefixes with numbers only, without tensors."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.patience import PATIENCE_SECONDS
from testkit.utterances import a_voice
from token2wav.cache.block_pool import BlockPool, OutOfBlocksError, Prefix, PrefixCache

VOICES = [a_voice(0, seed) for seed in range(6)]


@dataclass(eq=False)
class Numbered:
    """Content of a prefix: pages, and the number of its voice."""

    number: int
    pages: list[int]

    def release(self) -> None:
        """Frees nothing, because the content has only pages."""


class Voices:
    """Cache of prefixes that are computed by a stub: one page for each voice."""

    def __init__(self, most: int = 256) -> None:
        self.pool = BlockPool(12)
        self.cache: PrefixCache[Numbered] = PrefixCache(self.pool, most)
        self.made = 0

    def acquire(self, number: int) -> Prefix[Numbered]:
        return self.cache.acquire(VOICES[number].content_hash, lambda: self._compute(number))

    @property
    def live(self) -> list[int]:
        """Voices with a prefix in the cache, the least recently used first."""
        return [
            prefix.content.number
            for prefix in self.cache._prefixes.values()
            if prefix.content is not None
        ]

    def _compute(self, number: int) -> Numbered:
        self.made += 1
        return Numbered(number, self.cache.take(1))


@given(operations=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_any_use_of_a_pool(operations: list[tuple[bool, int]]) -> None:
    pool, free, owners = BlockPool(12), set(range(12)), list[list[int]]()
    for take, number in operations:
        if take and number > len(free):
            words = f"{number} pages needed, {len(free)} of 12 free; try again later"
            with pytest.raises(OutOfBlocksError, match=words):
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
    pool = BlockPool(40)
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


def test_prefix_in_use_is_not_evicted() -> None:
    voices = Voices(most=0)
    first, again = voices.acquire(0), voices.acquire(0)
    assert first is again
    voices.cache.release(first)
    assert not voices.cache.evict()
    assert (voices.live, voices.cache.referenced, voices.cache.pages, voices.cache.idle_pages) == (
        [0],
        1,
        1,
        0,
    )
    voices.cache.release(again)
    assert (voices.live, voices.cache.referenced, len(voices.cache), voices.pool.used) == (
        [],
        0,
        0,
        0,
    )


def test_threads_share_one_computation() -> None:
    voices, start = Voices(), threading.Barrier(4)

    def compute() -> Numbered:
        time.sleep(0.1)  # the other threads ask meanwhile
        return voices._compute(0)

    def acquire(_: int) -> Prefix[Numbered]:
        start.wait(timeout=PATIENCE_SECONDS)
        return voices.cache.acquire("voice", compute)

    with ThreadPoolExecutor(4) as threads:
        [prefix] = set(threads.map(acquire, range(4)))
    assert (voices.made, prefix.references) == (1, 4)


def test_most_prefixes_that_are_kept() -> None:
    voices = Voices(most=2)
    used = voices.acquire(5)  # does not count
    for number in range(5):
        voices.cache.release(voices.acquire(number))
    assert sorted(voices.live) == [3, 4, 5]
    voices.cache.release(used)
    assert len(voices.live) == 2


def test_eviction_of_idle_prefixes_only_for_enough_blocks() -> None:
    voices = Voices()
    used = voices.acquire(0)
    for number in (1, 2, 3):
        voices.cache.release(voices.acquire(number))
    with pytest.raises(OutOfBlocksError, match="12 pages needed, 8 of 12 free; try again later"):
        voices.cache.take(12)
    assert voices.live == [0, 1, 2, 3], "in vain none is given up"
    assert len(voices.cache.take(10)) == 10
    assert voices.live == [0, 3]
    assert voices.pool.free == 0
    voices.cache.release(used)


@given(operations=st.lists(st.tuples(st.sampled_from("aaare"), st.integers(0, 5)), max_size=60))
def test_any_use_of_a_prefix_cache(operations: list[tuple[str, int]]) -> None:
    voices = Voices()
    held: list[tuple[int, Prefix[Numbered]]] = []
    order: list[int] = []  # of last use
    for operation, number in operations:
        if operation == "a":
            held.append((number, voices.acquire(number)))
            order = [voice for voice in order if voice != number] + [number]
            content = held[-1][1].content
            assert content is not None
            assert content.number == number
        elif operation == "r" and held:
            voices.cache.release(held.pop(number % len(held))[1])
        elif operation == "e":
            idle = [voice for voice in order if voice not in {holder for holder, _ in held}]
            assert voices.cache.evict() == bool(idle)
            order = [voice for voice in order if voice not in idle[:1]]
        assert voices.live == order
        assert voices.pool.used == voices.cache.pages == len(voices.cache) == len(order)
        assert voices.cache.referenced == len({holder for holder, _ in held})
        assert voices.cache.computed == voices.made


def test_failing_compute_leaves_the_cache_usable() -> None:
    def fail() -> Numbered:
        raise RuntimeError("it broke")

    voices = Voices()
    with pytest.raises(RuntimeError, match="it broke"):
        voices.cache.acquire(VOICES[0].content_hash, fail)
    assert (len(voices.cache), voices.cache.referenced, voices.cache.computed) == (0, 0, 0)
    assert voices.acquire(0).content is not None
    assert (len(voices.cache), voices.cache.referenced, voices.cache.computed) == (1, 1, 1)
