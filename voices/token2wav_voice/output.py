"""Output files: they are checked before any work is done, and written wholly or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from token2wav_voice.errors import OutputError


def check(path: Path, suffix: str) -> None:
    """Raises OutputError if a file cannot be written there, or its name ends in something else than `suffix`."""
    if path.suffix != suffix:
        raise OutputError(f"{path}: the name must end in {suffix}")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: exists and is no regular file")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path}: no permission to write")


def write(path: Path, content: bytes) -> None:
    """Writes a file in place of an older one, which is still there if the file system refuses (OutputError)."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            draft.write_bytes(content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from None
