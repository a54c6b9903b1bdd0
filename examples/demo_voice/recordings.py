"""Recordings of the demo: a prompt with its words, and a sentence that training never used."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("recordings")
PROMPT, SENTENCE = FOLDER / "prompt.wav", FOLDER / "sentence.wav"
PROMPT_TEXT = (
    "The harbor was quiet in the early morning, and the first boats were coming home with their "
    "nets."
)
