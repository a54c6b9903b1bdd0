"""Limits of this process: memory, and a disk that is nearly full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Context in which files cannot grow beyond a size in bytes, as on a full disk."""
    with _limited(resource.RLIMIT_FSIZE, size):
        yield


@contextmanager
def memory_within(more_bytes: int) -> Iterator[None]:
    """Context with a limit of the further address space that this process may take, in bytes.

    Threads of earlier tests share this space, and an arena of the C library's allocator takes
    64 MiB at once.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with _limited(resource.RLIMIT_AS, pages * resource.getpagesize() + more_bytes):
        yield


@contextmanager
def _limited(kind: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
