"""Qwen3-TTS's 12 Hz tokenizer, and Code2Wav of Qwen3-Omni: a causal transformer and a causal
decoder with Snake activations.
"""

from token2wav.families.qwen3.config import MODEL_TYPES, read

__all__ = ["MODEL_TYPES", "WEIGHT_PREFIXES", "read"]

WEIGHT_PREFIXES = ("decoder.", "code2wav.")
