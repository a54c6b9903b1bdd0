"""Blocks of one stream: taken, shown to attention, forgotten and released here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from token2wav.cache.block_pool import PrefixCache
from token2wav.networks.masks import BlockMask


class StreamBlocks:
    """Blocks of one stream: those of a prefix that it shares, then its own.

    Args:
        cache: that they are taken from.
        shared: pages of the prefix, which are the stream's first blocks.
        mask: who may look at whom.
        reserved: pages to take now for blocks to come.

    Attributes:
        own: pages of the stream's own blocks, in order, but for those that no later block can see.

    Raises:
        OutOfBlocksError: there are not so many pages.
    """

    def __init__(self, cache: PrefixCache[Any], shared: Sequence[int], mask: BlockMask, reserved: int) -> None:
        self._cache = cache
        self._shared = list(shared)
        self._mask = mask
        self._first = len(shared)  # number of the first of `own`
        self._reserve = cache.take(reserved)
        self.own: list[int] = []

    @property
    def held(self) -> int:
        """Pages that the stream has taken."""
        return len(self.own) + len(self._reserve)

    def extend(self, count: int) -> list[list[int]]:
        """Block tables of the next blocks: pages that each may see in order, its own last.

        Raises:
            OutOfBlocksError: the reserve is too small, and so is the pool; nothing was taken.
        """
        if count > len(self._reserve):
            self._reserve += self._cache.take(count - len(self._reserve))
            self._reserve.sort()
        block = self._first + len(self.own)
        self.own += self._reserve[:count]
        del self._reserve[:count]
        return [self._table(number) for number in range(block, block + count)]

    def retract(self, count: int) -> None:
        """Puts the pages of the latest blocks back into the reserve: what is in them was provisional."""
        self._reserve[:0] = self.own[-count:]  # first, as the next blocks are the same ones
        del self.own[-count:]

    def forget_unseen(self) -> None:
        """Puts pages that no later block can see back into the reserve."""
        following = self._first + len(self.own)
        unseen = min(len(self.own), self._mask.first_needed(following) - self._first)
        if unseen > 0:
            self._reserve += self.own[:unseen]
            del self.own[:unseen]
            self._first += unseen

    def release(self) -> None:
        """Gives all pages back but those of the prefix."""
        self._cache.pool.release(self.own)
        self._cache.pool.release(self._reserve)

    def _table(self, block: int) -> list[int]:
        kept, needed = self._mask.prefix_blocks, self._mask.first_needed(block)
        shared = self._shared[:kept] + self._shared[max(kept, needed) :]
        return shared + self.own[max(0, needed - self._first) : block - self._first + 1]
