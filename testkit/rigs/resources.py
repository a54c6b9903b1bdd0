"""Resources that a process holds: sockets, tasks of its event loop, and memory."""

from __future__ import annotations

import asyncio
import gc
import operator
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.processes import resident_mib

_MOST_OBJECTS = 300  # such as cancelled timers, which asyncio keeps for a while
_SETTLE_S = 0.2  # in which sockets of earlier work are closed
_MOST_GROWTH_MIB = 16  # which the allocator may keep


def sockets() -> int:
    """Counts the open sockets of this process."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            count += str(descriptor.readlink()).startswith("socket:")
    return count


async def check_nothing_kept(
    repeat: Callable[[int], Awaitable[None]], warm_up: int, count: int
) -> None:
    """Checks that something can be repeated without keeping a socket, a task or memory.

    Args:
        repeat: function that repeats it several times.
        warm_up: repeats after which all caches are full.
        count: repeats after the warm-up.
    """
    await asyncio.sleep(_SETTLE_S)
    before = _sockets_and_tasks()
    await repeat(warm_up)
    await _return_to(before)
    objects, resident = len(gc.get_objects()), resident_mib(os.getpid())
    await repeat(count)
    await _return_to(before)
    assert len(gc.get_objects()) - objects < _MOST_OBJECTS
    assert resident_mib(os.getpid()) - resident < _MOST_GROWTH_MIB


def _sockets_and_tasks() -> tuple[int, int]:
    return sockets(), len(asyncio.all_tasks())


async def _return_to(before: tuple[int, int]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(operator.gt, left := _sockets_and_tasks(), before)):
        assert time.monotonic() < deadline, f"(sockets, tasks) {left}, and before {before}"
        await asyncio.sleep(0.02)
    gc.collect()
