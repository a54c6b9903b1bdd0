"""Recent answers of a server, so that many requests ask it once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from token2wav_gateway.errors import GatewayError

_AnswerT = TypeVar("_AnswerT")


class Recent(Generic[_AnswerT]):
    """Recent answer of a server, for all requests together. An error is an answer too.

    Create it in the event loop that uses it.

    Args:
        ask: asks the server.
        valid_s: seconds for which an answer is valid.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[_AnswerT]],
        valid_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._valid_s = valid_s
        self._clock = clock
        self._asking = asyncio.Lock()
        self._valid_until: float | None = None
        self._answer: _AnswerT | GatewayError

    async def get(self) -> _AnswerT:
        """Returns the answer, which other requests wait for too.

        Raises:
            GatewayError: the server does not answer, or not correctly.
        """
        async with self._asking:
            if self._valid_until is None or self._clock() >= self._valid_until:
                try:
                    self._answer = await self._ask()
                except GatewayError as error:
                    self._answer = error
                self._valid_until = self._clock() + self._valid_s
            answer = self._answer
        if isinstance(answer, GatewayError):
            raise answer.with_traceback(None)
        return answer
