"""MOSS Audio Tokenizer, the codec of MOSS-TTS, MOSS-TTSD and MOSS-TTS-Realtime: residual codebooks,
and causal transformers with patches.
"""

from token2wav.families.moss.config import FILES, MODEL_TYPES, read

__all__ = ["FILES", "MODEL_TYPES", "read"]
