"""XY-Tokenizer, the codec of MOSS-TTSD: transformers that are not causal, and a Vocos."""

from token2wav.families.xy_tokenizer.config import FILES, MODEL_TYPES, read

__all__ = ["FILES", "MODEL_TYPES", "read"]
