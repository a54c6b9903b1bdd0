"""Held-out sentences of the demo voice, and words for comparisons."""

from __future__ import annotations

import re
from pathlib import Path

HELD_OUT = Path(__file__).with_name("held_out.txt")
# Also held out. The scores of these sentences decided nothing.
UNSEEN = Path(__file__).with_name("unseen.txt")
# Also held out. These sentences narrow the intervals of the error rates.
FURTHER = Path(__file__).with_name("further.txt")


def held_out(path: Path = HELD_OUT) -> list[str]:
    """Returns the sentences of a file, which are used for measurements and never for training."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def normal(sentence: str) -> str:
    """Reduces a sentence to words in lower case, for comparison."""
    return " ".join(re.findall(r"[a-z0-9']+", sentence.lower()))
