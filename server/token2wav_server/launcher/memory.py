"""Memory of a server: the MiB that its processes hold, and the MiB that they may hold by default."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from token2wav_server.launcher.reaper import children

# The rest is left to the kernel, to other programs, and to growth while the server drains.
_SHARE = 0.8
# versions 2 and 1
_CGROUP_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def default_bound_mib(root: Path = Path("/")) -> int:
    """Returns a share of the memory of this machine, or of its container (cgroup) where that is
    less.
    """
    most = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    for limit in _CGROUP_LIMITS:
        # there is no such cgroup, or its limit is `max`
        with contextlib.suppress(OSError, ValueError):
            most = min(most, int((root / limit).read_text()))
    return int(_SHARE * most) >> 20


def resident_mib(server: int) -> int:
    """Returns the resident memory of a tritonserver and its model processes, 0 if it has ended.

    Pages that processes share (messages in /dev/shm, libraries, mapped weights) count once, as
    tritonserver's.
    """
    resident, _ = _pages(server)
    for model in children(server):
        own, shared = _pages(model)
        resident += own - shared
    return resident * _PAGE_BYTES >> 20


def _pages(process: int) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
        return resident, shared
    return 0, 0
