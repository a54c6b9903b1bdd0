"""Cache of objects that are read from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from token2wav_gateway.memory import Memory

_ObjectT = TypeVar("_ObjectT")
_Stamp: TypeAlias = "tuple[int, int, int] | None"


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
