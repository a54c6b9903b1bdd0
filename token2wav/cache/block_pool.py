"""Accounting of the key-value cache's blocks: who may have how many. No tensors here, so every engine can use it."""

from __future__ import annotations

import threading

from token2wav.errors import LimitError


class OutOfBlocksError(LimitError):
    """The cache has no room for what was asked."""


class BlockPool:
    """Hands out page numbers 0 .. capacity - 1, each to one owner at a time. Safe to use from several threads.

    The lowest free pages go first and runs are kept together, so that an engine can often read an owner's pages as one
    piece of memory.

    Args:
        capacity: pages in all.
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
                    f"cache: {count} pages needed, {len(self._free)} of {self.capacity} free; try again later"
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
