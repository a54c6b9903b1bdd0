"""Access: keys of clients, and the limits of each key."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from token2wav_gateway.errors import AccessDeniedError, BusyError
from token2wav_gateway.settings import KeySettings

_MINUTE_S = 60.0


class Holder:
    """Holder of a key, with the requests that it has started.

    Args:
        settings: limits of the key.
        clock: returns monotonic seconds.
    """

    def __init__(self, settings: KeySettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._open = 0
        self._started: deque[float] = deque()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Context manager of one request.

        Raises:
            BusyError: the key has too many requests, at the same time or within the last minute.
        """
        limits, now = self._settings, self._clock()
        while self._started and self._started[0] <= now - _MINUTE_S:
            self._started.popleft()
        if self._open >= limits.streams:
            raise BusyError(
                f"key {limits.name}: {limits.streams} requests are running, and no more are allowed"
            )
        if len(self._started) >= limits.requests_per_minute:
            raise BusyError(
                f"key {limits.name}: {limits.requests_per_minute} requests a minute are allowed"
            )
        self._started.append(now)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


class Access:
    """Check of access keys.

    Args:
        keys: keys; empty to admit every client.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, keys: Sequence[KeySettings], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._holders = [(key.sha256, Holder(key, clock)) for key in keys]

    @contextmanager
    def admitted(self, authorization: str | None) -> Iterator[None]:
        """Context manager of one request with an `Authorization` header.

        Raises:
            AccessDeniedError: the header is missing, or its key is unknown.
            BusyError: a limit of the key is reached.
        """
        if not self._holders:
            yield
            return
        with self._holder(authorization).admitted():
            yield

    def check(self, authorization: str | None) -> None:
        """Checks a key without counting a request.

        Raises:
            AccessDeniedError: the header is missing, or its key is unknown.
        """
        if self._holders:
            self._holder(authorization)

    def _holder(self, authorization: str | None) -> Holder:
        kind, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        found = None
        for (
            stored,
            holder,
        ) in self._holders:  # every key, so that the time of the check reveals nothing
            if hmac.compare_digest(stored, digest):
                found = holder
        if kind.lower() != "bearer" or found is None:
            raise AccessDeniedError("authorization: a valid key is needed, as 'Bearer KEY'")
        return found
