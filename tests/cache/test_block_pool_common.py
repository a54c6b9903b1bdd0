"""Common reserve of streams with a window: a running stream always gets its pages, none is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from token2wav.cache.block_pool import (
    BlockPool,
    CommonReserve,
    OutOfBlocksError,
    PageNeeds,
    PrefixCache,
    StreamBlocks,
)
from token2wav.config.block_grid import BlockGrid

PAGES = 20
OPERATIONS = "open", "prompt", "start", "end", "retract", "close"


@dataclass(eq=False)
class Prompt:
    pages: list[int]

    def release(self) -> None:
        """Frees nothing, because the content has only pages."""


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
                voice = self.cache.acquire(number, lambda: Prompt(self.cache.take(number % 4)))
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
