"""Block tables of a stream against the mask, block by block, and its pages from first to last."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from token2wav.cache.block_pool import BlockPool, OutOfBlocksError, PrefixCache, StreamBlocks
from token2wav.config.block_grid import BlockGrid
from token2wav.networks.masks import block_mask

CAPACITY = 64


@dataclass(eq=False)
class Pages:
    pages: list[int] = field(default_factory=list)

    def release(self) -> None:
        """Frees nothing, because the content has only pages."""


def a_cache() -> PrefixCache[Pages]:
    return PrefixCache(BlockPool(CAPACITY))


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
    cache = a_cache()
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


def test_a_window_needs_no_more_pages_than_it_reserved() -> None:
    cache = a_cache()
    blocks = StreamBlocks(cache, [], BlockGrid(1, prefix=0, left_blocks=2), 2 + 4)
    cache.take(cache.pool.free)
    for count in (4, 1, 4, 2, 3, 4) * 5:
        blocks.extend(count)
        blocks.forget_unseen()
    assert blocks.page_count == 6


def test_blocks_that_are_refused_leave_the_stream_as_it_was() -> None:
    cache = a_cache()
    blocks = StreamBlocks(cache, [], BlockGrid(1), 1)
    taken = cache.take(cache.pool.free - 1)
    with pytest.raises(OutOfBlocksError, match="cache: 2 pages needed, 1 of 64 free"):
        blocks.extend(3)
    assert (blocks.pages, blocks.page_count) == ([], 1)
    cache.pool.release(taken)
    assert [len(table) for table in blocks.extend(3)] == [1, 2, 3]
    with pytest.raises(OutOfBlocksError):
        StreamBlocks(cache, [], BlockGrid(1), CAPACITY)
    assert cache.pool.used == 3
