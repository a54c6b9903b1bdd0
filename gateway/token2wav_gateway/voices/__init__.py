"""Voices: a folder of voices, and recordings that become voices."""
