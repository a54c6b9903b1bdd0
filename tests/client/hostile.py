"""Array files with wrong headers, and a limit on the memory that reading them may take."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def npy_header(shape: str, descr: str = "<i8") -> bytes:
    """Returns the content of a `.npy` file that announces an array and has none of its data."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@contextmanager
def memory_within(more_bytes: int) -> Iterator[None]:
    """Limits the further address space that this process may take, in bytes.

    Threads of earlier tests share this space, and an arena of the C library's allocator takes
    64 MiB at once. 256 MiB leave room for that, and are still nothing beside the sizes that hostile
    files announce.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
