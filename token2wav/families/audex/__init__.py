"""Audex: the causal speech decoder of Nemotron Audex, a transformer without convolutions in its
output.
"""

from token2wav.families.audex.config import MODEL_TYPES, read

__all__ = ["MODEL_TYPES", "read"]
