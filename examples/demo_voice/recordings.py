"""Recordings of the demo: a prompt with its words, and a sentence that training never used."""

from __future__ import annotations

from pathlib import Path

from token2wav_server.demo import PROMPT_TEXT

__all__ = ["FOLDER", "PROMPT", "PROMPT_TEXT", "SENTENCE"]

FOLDER = Path(__file__).with_name("recordings")
PROMPT, SENTENCE = FOLDER / "prompt.wav", FOLDER / "sentence.wav"
