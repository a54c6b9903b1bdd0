"""Recordings of the demo: a prompt, and a sentence that training never used."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("recordings")
PROMPT, SENTENCE = FOLDER / "prompt.wav", FOLDER / "sentence.wav"
