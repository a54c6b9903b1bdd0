"""Memory of objects, of bounded size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_KeyT = TypeVar("_KeyT")
_ObjectT = TypeVar("_ObjectT")


class Memory(Generic[_KeyT, _ObjectT]):
    """Memory of the objects that were used last, by their keys. Several threads may use it.

    Args:
        most: largest number of objects. The object that was used least recently is forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._objects: OrderedDict[_KeyT, _ObjectT] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _KeyT) -> _ObjectT | None:
        with self._lock:
            if key in self._objects:
                self._objects.move_to_end(key)
            return self._objects.get(key)

    def put(self, key: _KeyT, remembered: _ObjectT) -> None:
        """Remembers an object, in place of an earlier one with the same key."""
        with self._lock:
            self._objects[key] = remembered
            self._objects.move_to_end(key)
            if len(self._objects) > self._most:
                self._objects.popitem(last=False)

    def forget(self, unwanted: Callable[[_KeyT, _ObjectT], bool]) -> None:
        """Forgets the objects for which `unwanted` returns true, after a key and its object."""
        with self._lock:
            for key in [key for key, found in self._objects.items() if unwanted(key, found)]:
                del self._objects[key]
