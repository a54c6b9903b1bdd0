"""Cache of objects that are read from files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

_ObjectT = TypeVar("_ObjectT")
_Stamp: TypeAlias = "tuple[int, int, int] | None"


class FileCache(Generic[_ObjectT]):
    """Cache of objects, each of which is read again only after one of its files has changed.

    A file has changed if its time, its size or its inode is another one.

    Args:
        most: largest number of objects. The object that was used least recently is forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[tuple[Path, ...], tuple[list[_Stamp], _ObjectT]] = OrderedDict()

    def get(self, files: tuple[Path, ...], read: Callable[[], _ObjectT]) -> _ObjectT:
        """Returns the object of some files, which need not exist. Raises as `read` does."""
        stamps = [_stamp(file) for file in files]
        known = self._known.get(files)
        if known is None or known[0] != stamps:
            self._known[files] = known = (stamps, read())
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        self._known.move_to_end(files)
        return known[1]


def _stamp(file: Path) -> _Stamp:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
