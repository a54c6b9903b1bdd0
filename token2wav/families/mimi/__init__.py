"""Mimi, the codec of Moshi, Kyutai TTS, Sesame CSM and others: a causal transformer and a causal
SEANet decoder.
"""

from token2wav.families.mimi.config import FILES, MODEL_TYPES, read

__all__ = ["DOWNLOADS", "FILES", "MODEL_TYPES", "read"]

DOWNLOADS = (
    "config.json",
    "mimi_config.json",
    "tokenizer-*-checkpoint*.safetensors|model.safetensors|pytorch_model.bin",
)
