"""Model folders with one thing changed."""

from __future__ import annotations

import re
from pathlib import Path


def edit_yaml(folder: Path, old: str, new: str) -> None:
    """Replaces the one place of `cosyvoice3.yaml` that a regular expression describes."""
    path = folder / "cosyvoice3.yaml"
    text, count = re.subn(old, new, path.read_text())
    assert count == 1
    path.write_text(text)
