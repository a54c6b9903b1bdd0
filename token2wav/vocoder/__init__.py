"""Mel to audio."""
