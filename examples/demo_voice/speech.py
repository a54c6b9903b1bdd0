"""Speech of the demo: recordings of sentences, and pocketsphinx's words."""

from __future__ import annotations

from pathlib import Path

import pocketsphinx

from token2wav_server.demo.speaker import HOP, MEL_PER_TOKEN, RATE_HZ, TOKEN_SAMPLES, Speaker

__all__ = [
    "HOP",
    "MEL_PER_TOKEN",
    "RATE_HZ",
    "TOKEN_SAMPLES",
    "Speaker",
    "dictionary",
    "language_model",
]


def dictionary() -> Path:
    """Returns the path of the pronouncing dictionary of pocketsphinx."""
    return Path(pocketsphinx.get_model_path("en-us/cmudict-en-us.dict"))


def language_model() -> Path:
    """Returns the path of pocketsphinx's trigrams of spoken and written English."""
    return Path(pocketsphinx.get_model_path("en-us/en-us.lm.bin"))
