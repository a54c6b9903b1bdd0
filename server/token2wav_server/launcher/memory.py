"""Memory of a server: the resident memory of its processes, and the default limit for it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from token2wav_server.launcher.reaper import children

# Share of the memory that a server may use. The rest is for the kernel, for other programs, and for
# the growth of the server while it drains.
_SHARE = 0.8
# Files of cgroup versions 2 and 1.
_CGROUP_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def default_bound_mib(root: Path = Path("/")) -> int:
    """Returns the default limit for the memory of a server, in MiB.

    It is 80 % of the memory of this machine. If the container (cgroup) of this process has less
    memory, it is 80 % of that.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    for file in _CGROUP_LIMITS:
        # An error means that the file does not exist, or that it has the value `max` (no limit).
        with contextlib.suppress(OSError, ValueError):
            memory_bytes = min(memory_bytes, int((root / file).read_text()))
    return int(_SHARE * memory_bytes) >> 20


def resident_mib(server: int, *others: int) -> int:
    """Returns the resident memory of a server, in MiB.

    Pages that processes share are counted once, for tritonserver: messages in /dev/shm, libraries
    and mapped weights.

    Args:
        server: process id of tritonserver. Its children are model processes of Triton.
        others: process ids of other processes of the server, such as the engine. A process that has
            ended counts nothing.
    """
    pages, _ = _pages(server)
    for process in (*children(server), *others):
        resident, shared = _pages(process)
        pages += resident - shared
    return pages * _PAGE_BYTES >> 20


def _pages(process: int) -> tuple[int, int]:
    """Returns the resident pages of a process, and the pages of these that it shares."""
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
        return resident, shared
    return 0, 0
