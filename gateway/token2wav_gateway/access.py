"""Access: keys of clients, and the limits of each key."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from token2wav_gateway.errors import AccessDeniedError, BusyError
from token2wav_gateway.settings import KeySettings

_MINUTE_S = 60.0
_LEAVING_S = 0.5  # for the request of a client that has left to end


class Holder:
    """Holder of a key, with the requests that it has started.

    Args:
        settings: limits of the key; None for the clients of a gateway without keys, which have no
            limits.
        clock: returns monotonic seconds.
    """

    def __init__(self, settings: KeySettings | None, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._open = 0
        self._ended = asyncio.Event()  # set when a request ends
        self._waiting = 0  # requests that wait for one to end
        self._started: deque[float] = deque()

    @property
    def name(self) -> str | None:
        """Name of the holder; None in a gateway without keys."""
        return None if self._settings is None else self._settings.name

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Context manager of one request.

        A client that interrupts its speech leaves the request, and may send the next one before the
        gateway has ended the last one. So a few requests above the limit wait for a moment.

        Raises:
            BusyError: the key has too many requests, at the same time or within the last minute.
        """
        limits = self._settings
        if limits is not None:
            await self._await_place(limits.streams)
            if self._open >= limits.streams:
                raise BusyError(
                    f"key {limits.name}: {limits.streams} requests are running, and no more are "
                    "allowed"
                )
        self.count_request()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._ended.set()

    async def _await_place(self, places: int) -> None:
        """Waits for a request to end. A connection that waits is taken from other keys, so no more
        requests wait than there are places.
        """
        if self._open < places or self._waiting >= places:
            return
        self._waiting += 1
        try:
            with anyio.move_on_after(_LEAVING_S):
                while self._open >= places:
                    self._ended.clear()
                    await self._ended.wait()
        finally:
            self._waiting -= 1

    def count_request(self) -> None:
        """Counts a request, or a sentence of a WebSocket.

        Raises:
            BusyError: the key has too many requests within the last minute.
        """
        limits, now = self._settings, self._clock()
        if limits is None:
            return
        while self._started and self._started[0] <= now - _MINUTE_S:
            self._started.popleft()
        if len(self._started) >= limits.requests_per_minute:
            raise BusyError(
                f"key {limits.name}: {limits.requests_per_minute} requests a minute are allowed"
            )
        self._started.append(now)


class Access:
    """Check of access keys.

    Args:
        keys: keys; empty to admit every client.
        clock: returns monotonic seconds.

    Attributes:
        everybody: holder of requests without limits.
    """

    def __init__(
        self, keys: Sequence[KeySettings], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._holders = [(key.sha256, Holder(key, clock)) for key in keys]
        self.everybody = Holder(None, clock)

    @asynccontextmanager
    async def admitted(self, authorization: str | None) -> AsyncIterator[Holder]:
        """Context manager of one request with an `Authorization` header; yields the key's holder.

        Raises:
            AccessDeniedError: the header is missing, or its key is unknown.
            BusyError: a limit of the key is reached.
        """
        holder = self.check(authorization)
        async with holder.admitted():
            yield holder

    def check(self, authorization: str | None) -> Holder:
        """Checks a key without counting a request, and returns its holder.

        Raises:
            AccessDeniedError: the header is missing, or its key is unknown.
        """
        if not self._holders:
            return self.everybody
        kind, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        holder = None
        # Every key is compared, so that the time of the check reveals nothing.
        for key_digest, candidate in self._holders:
            if hmac.compare_digest(key_digest, digest):
                holder = candidate
        if kind.lower() != "bearer" or holder is None:
            raise AccessDeniedError("authorization: a valid key is needed, as 'Bearer KEY'")
        return holder
