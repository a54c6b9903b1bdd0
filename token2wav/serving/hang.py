"""Time after which a batch counts as hung, for the workers and for the stages of the ensemble."""

LONGEST_CHUNK_TOKENS = 100
_SECONDS = 180.0  # a batch of eight chunks of 100 tokens takes 130 s on a slow CPU
# Tokens of that batch of eight chunks. The time for a larger batch, which `limits.batch_streams`
# may allow, grows in proportion to its tokens.
_TOKENS = 8 * LONGEST_CHUNK_TOKENS


def hang_seconds(tokens: int) -> float:
    """Returns the seconds after which a batch of `tokens` tokens counts as hung."""
    return _SECONDS * max(1.0, tokens / _TOKENS)
