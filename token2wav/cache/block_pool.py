"""Blocks of the key-value cache: a pool hands them out, streams take theirs, and share prefixes
computed once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from token2wav.errors import LimitError
from token2wav.networks.masks import BlockMask


class OutOfBlocksError(LimitError):
    """The cache has no room for what was asked."""


class BlockPool:
    """Hands out page numbers 0 .. capacity - 1, each to one owner at a time. Safe to use from
    several threads.

    The lowest free pages go first and runs are kept together, so that an engine can often read an
    owner's pages as one piece of memory.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))  # a stack: the lowest number is on top
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, count: int) -> list[int]:
        """Takes pages, in ascending order.

        Raises:
            OutOfBlocksError: there are not so many; none is taken.
        """
        with self._lock:
            if count > len(self._free):
                raise OutOfBlocksError(
                    f"cache: {count} pages needed, {len(self._free)} of {self.capacity} free; try "
                    f"again later"
                )
            taken = self._free[len(self._free) - count :][::-1]
            del self._free[len(self._free) - count :]
            return taken

    def release(self, pages: list[int]) -> None:
        """Gives pages back; the list is emptied."""
        with self._lock:
            self._free += pages
            self._free.sort(reverse=True)
        pages.clear()


class Content(Protocol):
    """Content of a prefix, as whoever asked first has computed it in pages of the pool."""

    pages: list[int]


ContentT = TypeVar("ContentT", bound=Content)


@dataclass(eq=False)
class Prefix(Generic[ContentT]):
    """Prefix that streams share. Read-only once its content is there."""

    content: ContentT | None = None
    references: int = 0
    computing: threading.Lock = field(default_factory=threading.Lock)


class PrefixCache(Generic[ContentT]):
    """Owner of the pool: prefixes by their keys, and blocks for whoever needs some. Safe to use
    from several threads.

    A prefix is computed by whoever asks first; others who ask meanwhile wait for it. One that
    nobody uses stays until there are too many, or until its blocks are needed; the one goes first
    that was used least recently.

    Blocks are taken here and may be given back to the pool; `most` prefixes are kept beside those
    that are in use.
    """

    def __init__(self, pool: BlockPool, most: int = 256) -> None:
        self.pool = pool
        self._most = most
        self._prefixes: OrderedDict[Hashable, Prefix[ContentT]] = OrderedDict()
        self._lock = threading.RLock()
        # how often a prefix was there in the end, and had to be computed
        self.acquired = self.computed = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def referenced(self) -> int:
        """Prefixes that streams use now."""
        with self._lock:
            return sum(prefix.references > 0 for prefix in self._prefixes.values())

    @property
    def pages(self) -> int:
        """Of all prefixes that are there."""
        with self._lock:
            return sum(
                len(prefix.content.pages)
                for prefix in self._prefixes.values()
                if prefix.content is not None
            )

    @property
    def idle_pages(self) -> int:
        """Of prefixes that no stream uses, which are evicted when their pages are needed."""
        with self._lock:
            return sum(len(content.pages) for content in self._idle().values())

    def acquire(self, key: Hashable, compute: Callable[[], ContentT]) -> Prefix[ContentT]:
        """The prefix of a key, with a reference that `release` gives back.

        Raises what `compute` raises.
        """
        with self._lock:
            prefix = self._prefixes.setdefault(key, Prefix())
            self._prefixes.move_to_end(key)
            prefix.references += 1
        try:
            with prefix.computing:
                computed = prefix.content is None
                if computed:
                    prefix.content = compute()
        except BaseException:
            self.release(prefix)
            raise
        with self._lock:
            self.acquired += 1
            self.computed += computed
        return prefix

    def release(self, prefix: Prefix[ContentT]) -> None:
        """Gives back one reference."""
        with self._lock:
            prefix.references -= 1
            if not prefix.references and prefix.content is None:  # it could not be computed
                self._prefixes = OrderedDict(
                    (key, each) for key, each in self._prefixes.items() if each is not prefix
                )
            while len(self) - self.referenced > self._most and self.evict():
                pass

    def take(self, count: int) -> list[int]:
        """Blocks of the pool, those of prefixes that nobody uses included if that is enough.

        Raises:
            OutOfBlocksError: it is not; nothing was taken or evicted.
        """
        with self._lock:  # eviction and taking are one step
            while self.pool.free < count <= self.pool.free + self.idle_pages and self.evict():
                pass
            return self.pool.acquire(count)

    def evict(self) -> bool:
        """Frees the least recently used prefix that nobody refers to; says whether there was one."""
        with self._lock:
            for key, content in self._idle().items():
                del self._prefixes[key]
                self.pool.release(content.pages)
                return True
        return False

    def _idle(self) -> dict[Hashable, ContentT]:
        """Contents that nobody refers to, the least recently used first."""
        return {
            key: prefix.content
            for key, prefix in self._prefixes.items()
            if not prefix.references and prefix.content is not None
        }


class StreamBlocks:
    """Blocks of one stream: those of a prefix that it shares, then its own.

    Args:
        cache, reserved: where they are taken from, and how many now for blocks to come.
        shared: pages of the prefix, which are the stream's first blocks.
        mask: who may look at whom.

    Raises:
        OutOfBlocksError: there are not so many pages.
    """

    def __init__(
        self, cache: PrefixCache[Any], shared: Sequence[int], mask: BlockMask, reserved: int
    ) -> None:
        self._cache = cache
        self._shared = list(shared)
        self._mask = mask
        self._first = len(shared)  # number of the first of `own`
        self._reserve = cache.take(reserved)
        # pages of its own blocks, in order, but for those that no later block can see
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
        """Puts the pages of the latest blocks back into the reserve: what is in them was
        provisional.
        """
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
