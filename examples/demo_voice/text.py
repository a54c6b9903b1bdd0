"""Held-out sentences of the demo voice, and words for comparisons."""

from __future__ import annotations

import re
from pathlib import Path

HELD_OUT = Path(__file__).with_name("held_out.txt")
# Held-out sentences. No decision about the recipe used their scores.
UNSEEN = Path(__file__).with_name("unseen.txt")
# Held-out sentences that narrow the intervals of the error rates.
FURTHER = Path(__file__).with_name("further.txt")


def held_out(path: Path = HELD_OUT) -> list[str]:
    """Reads the sentences of a file. Measurements use these sentences, training never does."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def normal(sentence: str) -> str:
    """Reduces a sentence to its words in lower case, so that two sentences can be compared."""
    return " ".join(re.findall(r"[a-z0-9']+", sentence.lower()))
