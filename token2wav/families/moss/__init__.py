"""MOSS Audio Tokenizer, the codec of MOSS-TTS, MOSS-TTSD and MOSS-TTS-Realtime: residual codebooks,
and causal transformers with patches.
"""

from token2wav.families.moss.config import MODEL_TYPES, read

__all__ = ["MODEL_TYPES", "read"]
