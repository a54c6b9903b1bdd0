"""Handles of open utterances and what an engine keeps for each."""

from __future__ import annotations

import itertools
import threading
from typing import Generic, TypeVar

from token2wav.errors import StreamClosedError

State = TypeVar("State")


class HandleTable(Generic[State]):
    """Maps handles to states; safe to use from several threads."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._next = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, state: State) -> int:
        with self._lock:
            handle = next(self._next)
            self._states[handle] = state
            return handle

    def __getitem__(self, handle: int) -> State:
        try:
            return self._states[handle]
        except KeyError:
            raise StreamClosedError(f"stream {handle}: it has ended") from None

    def remove(self, handle: int) -> State | None:
        """The state that a handle stood for, or None if it stood for none."""
        with self._lock:
            return self._states.pop(handle, None)

    def __len__(self) -> int:
        return len(self._states)
