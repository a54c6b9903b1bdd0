"""Model folders with one thing changed."""

from __future__ import annotations

from pathlib import Path


def edit_text(path: Path, *changes: tuple[str, str], name: str = "") -> Path:
    """Replaces texts of a file, each of which occurs once, and returns the file.

    Args:
        changes: old and new texts.
        name: new name of the file; empty to keep its name.
    """
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    if name:
        path = path.rename(path.with_name(name))
    path.write_text(text)
    return path
