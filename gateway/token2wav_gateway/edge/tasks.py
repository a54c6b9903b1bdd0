"""Tasks: the first of several to end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_ResultT = TypeVar("_ResultT")


async def first_of(*parts: Awaitable[_ResultT]) -> _ResultT:
    """Runs several parts until the first one ends, and cancels the others.

    Returns:
        Result of the part that ended. If several have ended, an error counts before a result, and
        then the first one in order.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
        return next((task for task in ended if task.exception()), ended[0]).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
