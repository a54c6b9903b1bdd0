"""Words of pocketsphinx: its dictionary and its language model of English."""

from __future__ import annotations

from pathlib import Path

import pocketsphinx


def dictionary() -> Path:
    """Returns the path of the pronouncing dictionary of pocketsphinx."""
    return Path(pocketsphinx.get_model_path("en-us/cmudict-en-us.dict"))


def language_model() -> Path:
    """Returns the path of pocketsphinx's trigrams of spoken and written English."""
    return Path(pocketsphinx.get_model_path("en-us/en-us.lm.bin"))
