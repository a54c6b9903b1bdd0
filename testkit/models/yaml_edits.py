"""Model files of the published layouts, and changes of their text."""

from __future__ import annotations

from pathlib import Path

from testkit.models.family_golden import FamilyGolden

FILES = Path(__file__).with_name("files")


def published_text(name: str, golden: FamilyGolden) -> str:
    """Returns the text of a published model file, with the sizes of a golden set."""
    return (FILES / name).read_text().format(**golden.sizes)


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
