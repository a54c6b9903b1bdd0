"""Time after which a batch counts as hung, for the workers and for the stages of the ensemble."""

LONGEST_CHUNK_TOKENS = 100
_SECONDS = 180.0  # a batch of eight chunks of 100 tokens takes 130 s on a slow CPU
_TOKENS = 8 * LONGEST_CHUNK_TOKENS  # in that batch


def hang_seconds(tokens: int) -> float:
    """Returns the time for a batch. Above `_TOKENS` it grows in proportion to the tokens."""
    return _SECONDS * max(1.0, tokens / _TOKENS)
