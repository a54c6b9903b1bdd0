"""Vocabulary of the speech server, which bounds the tokens of the language model."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

_VALID_S = 10.0  # after which a server may have another model


class Vocabulary:
    """Vocabulary of the speech server. A known vocabulary is valid for ten seconds.

    Args:
        ask: returns the number of different tokens, or of the codes of each codebook; () if the
            server does not tell them.
    """

    def __init__(self, ask: Callable[[], Awaitable[tuple[int, ...]]]) -> None:
        self._ask = ask
        self._sizes: tuple[int, ...] = ()
        self._valid_until = 0.0

    async def sizes(self) -> tuple[int, ...]:
        """Returns the numbers, which `ask` returns."""
        if not self._sizes or time.monotonic() >= self._valid_until:
            self._sizes = await self._ask()
            self._valid_until = time.monotonic() + _VALID_S
        return self._sizes
