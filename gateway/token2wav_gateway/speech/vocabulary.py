"""Vocabulary of the speech server, which bounds the tokens of the language model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_VALID_S = 10.0  # after which a server may have another model


class Vocabulary:
    """Vocabulary of the speech server, for all texts.

    An answer of the server is valid for ten seconds, also if it tells no vocabulary. Then the next
    text asks the server again, and other texts wait for the same answer. If the new answer tells no
    vocabulary, the last known one stays. Create it in the event loop that uses it.

    Args:
        ask: returns the number of different tokens, or of the codes of each codebook; () if the
            server does not tell them.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[tuple[int, ...]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._sizes: tuple[int, ...] = ()
        self._valid_until: float | None = None
        self._asking = asyncio.Lock()

    async def sizes(self) -> tuple[int, ...]:
        """Returns the numbers, which `ask` returns; () if the server has never told them."""
        async with self._asking:
            if self._valid_until is None or self._clock() >= self._valid_until:
                self._sizes = await self._ask() or self._sizes
                self._valid_until = self._clock() + _VALID_S
            return self._sizes
