"""SNAC, the codec of Orpheus and Svara: codebooks at several rates, symmetric convolutions with
Snake, and noise.
"""

from token2wav.families.snac.config import CONFIG_KEYS, read

__all__ = ["CONFIG_KEYS", "read"]
