"""Ownership of the pages of the key-value cache: the pool of free pages, the cache of prefixes that
streams share, the common reserve of streams with a window, and the pages of each stream.

A page is the memory for the keys and values of one attention block. This module handles only page
numbers. `PagedKVCache` has the tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from token2wav.config.block_grid import BlockGrid
from token2wav.errors import LimitError


class OutOfBlocksError(LimitError):
    """The cache has too few free pages for a request."""


class BlockPool:
    """Pool of the page numbers 0 .. capacity - 1. A page has at most one owner. Thread-safe.

    The lowest free pages are taken first. The pages of an owner are therefore often consecutive,
    and a backend can read them as one piece of memory.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))  # a stack with the lowest number on top
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, count: int) -> list[int]:
        """Takes `count` free pages, in ascending order. Raises OutOfBlocksError, and takes none, if
        fewer are free.
        """
        with self._lock:
            if count > len(self._free):
                raise OutOfBlocksError(
                    f"cache: {count} pages needed, {len(self._free)} of {self.capacity} free; "
                    "try again later"
                )
            taken = self._free[len(self._free) - count :][::-1]
            del self._free[len(self._free) - count :]
            return taken

    def release(self, pages: list[int]) -> None:
        """Frees pages, and empties the list."""
        with self._lock:
            self._free += pages
            self._free.sort(reverse=True)
        pages.clear()


class Content(Protocol):
    """Content of a prefix, which is computed once and stored in pages of the pool."""

    pages: list[int]

    def release(self) -> None:
        """Frees the content's memory besides its pages."""


ContentT = TypeVar("ContentT", bound=Content)


@dataclass(eq=False)
class Prefix(Generic[ContentT]):
    """Prefix that streams share, for example the prompt of a voice."""

    content: ContentT | None = None  # None until it is computed; it never changes after that
    references: int = 0
    computing: threading.Lock = field(default_factory=threading.Lock)


class PrefixCache(Generic[ContentT]):
    """Cache of prefixes by key. Thread-safe.

    The first thread that acquires a prefix computes it. Other threads that acquire the same prefix
    wait until it is computed. An unused prefix stays in the cache until more than `most` prefixes
    are unused, or until its pages are needed. The least recently used prefix is evicted first.

    Pages that `take` returns are released directly to the pool.
    """

    def __init__(self, pool: BlockPool, most: int = 256) -> None:
        self.pool = pool
        self._most = most
        self._prefixes: OrderedDict[Hashable, Prefix[ContentT]] = OrderedDict()
        self._lock = threading.RLock()
        self.acquired = self.computed = 0  # successful calls of `acquire`; those that computed

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def referenced(self) -> int:
        with self._lock:
            return sum(prefix.references > 0 for prefix in self._prefixes.values())

    @property
    def pages(self) -> int:
        with self._lock:
            return sum(
                len(prefix.content.pages)
                for prefix in self._prefixes.values()
                if prefix.content is not None
            )

    @property
    def idle_pages(self) -> int:
        """Pages of unused prefixes."""
        with self._lock:
            return sum(len(content.pages) for content in self._idle().values())

    def acquire(self, key: Hashable, compute: Callable[[], ContentT]) -> Prefix[ContentT]:
        """Returns the prefix of a key, and adds a reference to it, which `release` removes.

        Args:
            compute: called only if the content is not in the cache. Its exceptions are passed on.
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

    def holds(self, key: Hashable) -> bool:
        """Returns whether the content of a prefix is in the cache."""
        with self._lock:
            prefix = self._prefixes.get(key)
            return prefix is not None and prefix.content is not None

    def release(self, prefix: Prefix[ContentT]) -> None:
        with self._lock:
            prefix.references -= 1
            if not prefix.references and prefix.content is None:  # its computation failed
                self._prefixes = OrderedDict(
                    (key, entry) for key, entry in self._prefixes.items() if entry is not prefix
                )
            while len(self) - self.referenced > self._most and self.evict():
                pass

    def take(self, count: int) -> list[int]:
        """Takes `count` pages from the pool. Evicts unused prefixes if too few pages are free.
        Raises OutOfBlocksError, and takes and evicts nothing, if even eviction would not free
        enough.
        """
        with self._lock:  # eviction and taking are one step
            while self.pool.free < count <= self.pool.free + self.idle_pages and self.evict():
                pass
            return self.pool.acquire(count)

    def evict(self) -> bool:
        """Evicts the least recently used of the unused prefixes. Returns whether there was one."""
        with self._lock:
            for key, content in self._idle().items():
                del self._prefixes[key]
                self.pool.release(content.pages)
                content.release()
                return True
        return False

    def _idle(self) -> dict[Hashable, ContentT]:
        """Returns the contents of unused prefixes, the least recently used first."""
        return {
            key: prefix.content
            for key, prefix in self._prefixes.items()
            if not prefix.references and prefix.content is not None
        }


@dataclass(frozen=True)
class PageNeeds:
    """Pages that a stream with a window of visible blocks needs, without its prefix."""

    window: int  # most pages between chunks: one for each visible block
    chunk: int = 0  # most further pages while a chunk of the stream is computed

    def streams(self, pages: int, chunks: int) -> int | None:
        """Returns how many streams fit into pages without prefixes (see `CommonReserve`); None for
        any number.
        """
        few = pages // max(1, self.window + self.chunk)
        if few < chunks:
            return few
        return (pages - chunks * self.chunk) // self.window if self.window else None


class CommonReserve:
    """Reserve of pages for chunks, which all streams with a window share.

    At most `chunks` chunks are computed at the same moment, and at most one of each stream. N open
    streams can therefore never need more pages (`PageNeeds`) than

        N * window + min(N, chunks) * chunk

    The cache holds exactly these pages for them. Every stream owns its `window` pages from its
    opening on. The reserve owns the rest, and lends pages to chunks. A chunk that has its pages
    waits for no page of another chunk, so it ends and returns them. A stream is refused when it
    opens, or always gets its pages.

    Thread-safe.
    """

    def __init__(self, cache: PrefixCache[Any], needs: PageNeeds) -> None:
        self.needs = needs
        self._cache = cache
        self._chunks: int | None = None
        self._streams = 0
        self._free: list[int] = []
        self._lent = 0
        self._lock = threading.Lock()

    def limit(self, chunks: int) -> None:
        """Sets how many chunks the caller computes at the same time; by default any number."""
        with self._lock:
            self._chunks = chunks
            self._return_surplus()

    def open(self) -> list[int]:
        """Takes the pages that a new stream keeps, and enlarges the reserve for it. Raises
        OutOfBlocksError, and takes nothing, if the cache has too few free pages.
        """
        with self._lock:
            more = max(0, self._size(self._streams + 1) - len(self._free) - self._lent)
            pages = self._cache.take(self.needs.window + more)
            self._streams += 1
            self._free += pages[self.needs.window :]
            return pages[: self.needs.window]

    def close(self, pages: list[int]) -> None:
        """Reclaims all pages of a closed stream, including borrowed ones."""
        with self._lock:
            self._streams -= 1
            self._lent -= len(pages) - self.needs.window
            self._free += pages
            self._return_surplus()

    def lend(self, count: int) -> list[int]:
        """Lends pages to a chunk of an open stream. Raises OutOfBlocksError only if the caller
        computes more chunks than the limit allows.
        """
        with self._lock:
            if count > len(self._free):
                self._free += self._cache.take(count - len(self._free))
            self._free.sort()
            lent = self._free[:count]
            del self._free[:count]
            self._lent += count
            return lent

    def give_back(self, pages: list[int]) -> None:
        with self._lock:
            self._lent -= len(pages)
            self._free += pages
            self._return_surplus()

    def _size(self, streams: int) -> int:
        running = streams if self._chunks is None else min(streams, self._chunks)
        return running * self.needs.chunk

    def _return_surplus(self) -> None:
        surplus = len(self._free) + self._lent - self._size(self._streams)
        if (count := min(surplus, len(self._free))) > 0:
            self._free.sort()
            released = self._free[-count:]
            del self._free[-count:]
            self._cache.pool.release(released)


class StreamBlocks:
    """Pages of the blocks of one stream: the blocks of the shared prefix, then its own blocks.

    Args:
        reserved: pages to take now, for blocks that are computed later.
        common: common reserve, from which a stream with a window takes these pages, and borrows
            more for each chunk; None to take all pages from the cache.

    Attributes:
        pages: pages of the stream's own blocks that a later block attends to, in order.
    """

    def __init__(
        self,
        cache: PrefixCache[Any],
        shared: Sequence[int],
        grid: BlockGrid,
        reserved: int = 0,
        common: CommonReserve | None = None,
    ) -> None:
        self._cache = cache
        self._common = common
        self._shared = list(shared)
        self._grid = grid
        self._first = len(shared)  # index in the stream of the first block in `pages`
        self._reserve = common.open() if common else cache.take(reserved)
        self.pages: list[int] = []

    @property
    def page_count(self) -> int:
        """Pages that the stream has taken, without the prefix."""
        return len(self.pages) + len(self._reserve)

    def extend(self, count: int) -> list[list[int]]:
        """Adds `count` blocks. Raises OutOfBlocksError, and takes no page, if reserve and cache
        have too few.

        Returns:
            Block table of each new block: the pages of the blocks that it attends to, in order. Its
            own page is the last.
        """
        if count > len(self._reserve):
            source = self._common.lend if self._common else self._cache.take
            self._reserve += source(count - len(self._reserve))
            self._reserve.sort()
        block = self._first + len(self.pages)
        self.pages += self._reserve[:count]
        del self._reserve[:count]
        return [self._table(number) for number in range(block, block + count)]

    def retract(self, count: int) -> None:
        """Removes the latest `count` blocks, and reserves their pages, except borrowed ones.

        The blocks were provisional, or their chunk failed. The pages go to the front of the
        reserve, so that the next chunk computes the same blocks in the same pages.
        """
        self._reserve[:0] = self.pages[-count:]
        del self.pages[-count:]
        self._repay()

    def forget_unseen(self) -> None:
        """Moves the pages of blocks that no later block attends to into the reserve, except
        borrowed ones.
        """
        following = self._first + len(self.pages)
        unseen = min(len(self.pages), self._grid.first_needed(following) - self._first)
        if unseen > 0:
            self._reserve += self.pages[:unseen]
            del self.pages[:unseen]
            self._first += unseen
        self._repay()

    def release(self) -> None:
        pages, common = self.pages + self._reserve, self._common
        self.pages, self._reserve, self._common = [], [], None  # a second call does nothing
        if common:
            common.close(pages)
        else:
            self._cache.pool.release(pages)

    def _repay(self) -> None:
        """Returns borrowed pages that hold no block to the common reserve."""
        if self._common and (
            borrowed := min(self.page_count - self._common.needs.window, len(self._reserve))
        ):
            self._common.give_back(self._reserve[-borrowed:])
            del self._reserve[-borrowed:]

    def _table(self, block: int) -> list[int]:
        return [self._page(visible) for visible in self._grid.visible_blocks(block)]

    def _page(self, block: int) -> int:
        shared = block < len(self._shared)
        return self._shared[block] if shared else self.pages[block - self._first]
