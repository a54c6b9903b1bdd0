"""Streaming of utterances: it collects tokens, decides when a chunk runs, and takes it through flow and vocoder."""
