"""Memory of objects, of bounded size, and of objects that are read from files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

_KeyT = TypeVar("_KeyT")
_ObjectT = TypeVar("_ObjectT")
_Stamp: TypeAlias = "tuple[int, int, int] | None"


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
        """Returns the object of a key; None if it is not remembered."""
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


class FileCache(Generic[_ObjectT]):
    """Cache of objects, each of which is read again only after one of its files has changed.

    A file has changed if its time, its size or its inode is another one.

    Args:
        most: largest number of objects, as for `Memory`.
    """

    def __init__(self, most: int) -> None:
        self._known = Memory[tuple[Path, ...], tuple[list[_Stamp], _ObjectT]](most)

    def get(self, files: tuple[Path, ...], read: Callable[[], _ObjectT]) -> _ObjectT:
        """Returns the object of some files, which need not exist. Raises as `read` does."""
        stamps = [_stamp(file) for file in files]
        known = self._known.get(files)
        if known is None or known[0] != stamps:
            known = (stamps, read())
            self._known.put(files, known)
        return known[1]

    def forget(self, files: tuple[Path, ...]) -> None:
        """Forgets the object of some files."""
        self._known.forget(lambda known, _: known == files)


def _stamp(file: Path) -> _Stamp:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
