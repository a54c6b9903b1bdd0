"""LFM2-Audio: its audio detokenizer, a causal LFM2 and an inverse STFT."""

from token2wav.families.lfm2_audio.config import MODEL_TYPES, read

__all__ = ["MODEL_TYPES", "read"]
