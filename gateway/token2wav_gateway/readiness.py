"""Readiness of the servers behind the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from token2wav_gateway.errors import GatewayError

_VALID_S = 1.0  # seconds for which a result is valid


class Readiness:
    """Readiness of the servers behind the gateway, which is checked at most once a second.

    A check synthesizes three tokens, and clients need no key for the readiness. If each request had
    a check of its own, many requests would delay the texts of other clients.

    Create it in the event loop that uses it.

    Args:
        check: raises GatewayError if a server does not work.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, check: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._check = check
        self._clock = clock
        self._checking = asyncio.Lock()
        self._valid_until: float | None = None
        self._failure: GatewayError | None = None

    async def confirm(self) -> None:
        """Returns if the servers work.

        Raises:
            GatewayError: a server does not answer, or not correctly.
        """
        async with self._checking:
            if self._valid_until is None or self._clock() >= self._valid_until:
                self._failure = await self._result()
                self._valid_until = self._clock() + _VALID_S
            failure = self._failure
        if failure is not None:
            raise failure.with_traceback(None)

    async def _result(self) -> GatewayError | None:
        try:
            await self._check()
        except GatewayError as error:
            return error
        return None
