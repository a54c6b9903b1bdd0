"""Pages of the cache, as numbers without tensors: prefixes, common reserve, tables of blocks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.patience import PATIENCE_SECONDS
from token2wav.cache.block_pool import (
    BlockPool,
    CommonReserve,
    OutOfBlocksError,
    PageNeeds,
    Prefix,
    PrefixCache,
    StreamBlocks,
)
from token2wav.config.block_grid import BlockGrid
from token2wav.networks.masks import block_mask


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
        return self.cache.acquire(number, lambda: self._compute(number))

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


# Common reserve of streams with a window: a running stream always gets its pages, none is lost.

PAGES = 20
OPERATIONS = "open", "prompt", "start", "end", "retract", "close"


@dataclass(eq=False)
class Streams:
    """Streams of one pool, of which at most `chunks` compute a chunk at the same time."""

    needs: PageNeeds
    chunks: int
    idle: list[StreamBlocks] = field(default_factory=list)
    # streams that compute a chunk, with its number of blocks, and whether they were cancelled
    running: list[tuple[StreamBlocks, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache: PrefixCache[Any] = PrefixCache(BlockPool(PAGES))
        self.common = CommonReserve(self.cache, self.needs)
        self.common.limit(self.chunks)

    def do(self, operation: str, number: int) -> None:
        if operation == "open":
            grid = BlockGrid(1, left_blocks=self.needs.window)
            before = self.cache.pool.used
            try:
                self.idle.append(StreamBlocks(self.cache, [], grid, common=self.common))
            except OutOfBlocksError:
                assert self.cache.pool.used == before
        elif operation == "prompt":
            try:  # of a voice, which may stay in the cache after its stream
                voice = self.cache.acquire(
                    number, lambda: Numbered(number, self.cache.take(number % 4))
                )
                self.cache.release(voice)
            except OutOfBlocksError:
                pass
        elif operation == "start" and self.idle and len(self.running) < self.chunks:
            blocks = self.idle.pop(number % len(self.idle))
            most = self.needs.window + self.needs.chunk - len(blocks.pages)
            count = 1 + number % most
            blocks.extend(count)  # never fails
            self.running.append((blocks, count, False))
        elif operation == "close" and (total := len(self.idle) + len(self.running)):
            if (index := number % total) < len(self.idle):
                self.idle.pop(index).release()
            else:  # a cancelled stream keeps its pages until its chunk ends
                blocks, count, _ = self.running.pop(index - len(self.idle))
                self.running.append((blocks, count, True))
        elif operation in ("end", "retract") and self.running:
            blocks, count, cancelled = self.running.pop(number % len(self.running))
            if operation == "retract":
                blocks.retract(count)
            else:
                blocks.forget_unseen()
            if cancelled:
                blocks.release()
            else:
                self.idle.append(blocks)

    @property
    def open(self) -> int:
        return len(self.idle) + len(self.running)

    @property
    def pages(self) -> int:
        """Number of pages without those of prompts."""
        return self.cache.pool.used - self.cache.pages


@settings(max_examples=60)
@given(
    window=st.integers(0, 3),
    chunk=st.integers(1, 4),
    chunks=st.integers(1, 3),
    operations=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 11)), min_size=10, max_size=60
    ),
)
def test_any_use_of_a_common_reserve(
    window: int, chunk: int, chunks: int, operations: list[tuple[str, int]]
) -> None:
    streams = Streams(PageNeeds(window, chunk), chunks)
    for operation, number in operations:
        streams.do(operation, number)
        assert streams.pages == streams.open * window + min(streams.open, chunks) * chunk
        pages = [page for blocks in streams.idle for page in blocks.pages]
        pages += [page for blocks, *_ in streams.running for page in blocks.pages]
        assert len(pages) == len(set(pages))
        assert all(blocks.page_count == window for blocks in streams.idle)
    while streams.open:
        streams.do("end", 0)
        streams.do("close", 0)
    assert streams.pages == 0
    while streams.cache.evict():
        pass
    assert streams.cache.take(PAGES) == list(range(PAGES))


@pytest.mark.parametrize(
    ("window", "chunk", "chunks", "fit"),
    [(2, 3, 2, 7), (2, 3, 9, 4), (4, 1, 1, 4), (0, 4, 6, 5)],
)
def test_as_many_streams_open_as_fit(window: int, chunk: int, chunks: int, fit: int) -> None:
    streams = Streams(PageNeeds(window, chunk), chunks)
    assert streams.needs.streams(PAGES, chunks) == fit
    for _ in range(fit):
        streams.do("open", 0)
    assert streams.open == fit
    streams.do("open", 0)
    assert streams.open == fit


def test_without_kept_pages_any_number_of_streams_fits() -> None:
    assert PageNeeds(0, 3).streams(PAGES, 2) is None
    assert PageNeeds(0, 3).streams(6, 2) is None
    assert PageNeeds(0, 3).streams(5, 2) == 1


def test_more_chunks_than_the_limit_take_free_pages_or_fail() -> None:
    streams = Streams(PageNeeds(1, 2), 1)
    for _ in range(2):
        streams.do("open", 0)
    first, second = streams.idle
    first.extend(3)
    pages = streams.cache.take(PAGES - 6)
    second.extend(3)
    first.forget_unseen()
    second.forget_unseen()
    assert streams.pages == 2 + 2 + len(pages)
    first.extend(2)
    streams.cache.take(PAGES - streams.cache.pool.used)
    with pytest.raises(OutOfBlocksError, match="try again later"):
        second.extend(2)
    assert (len(second.pages), second.page_count) == (1, 1)


# Tables of blocks.


@given(
    prefix=st.integers(0, 4),
    prefix_stays=st.booleans(),
    left=st.integers(-1, 5),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    reserved=st.integers(0, 5),
)
def test_block_tables_match_the_attention_mask(
    prefix: int, prefix_stays: bool, left: int, counts: list[int], reserved: int
) -> None:
    cache: PrefixCache[Numbered] = PrefixCache(BlockPool(64))
    shared = cache.take(prefix)
    grid = BlockGrid(1, prefix=prefix if prefix_stays else 0, left_blocks=left)
    blocks = StreamBlocks(cache, shared, grid, reserved)
    every = list(shared)  # page of every block, forgotten ones included
    for count in counts:
        for table in blocks.extend(count):
            every.append(table[-1])
            visible = block_mask(grid, len(every))[-1]
            assert table == [page for page, seen in zip(every, visible, strict=True) if seen]
        assert cache.pool.used == prefix + blocks.page_count
        blocks.forget_unseen()
        later = block_mask(grid, len(every) + 1)[-1, prefix:-1]
        assert len(blocks.pages) == int(torch.count_nonzero(later)), (
            "no page that no later block can see"
        )
    blocks.release()
    assert cache.pool.used == prefix
