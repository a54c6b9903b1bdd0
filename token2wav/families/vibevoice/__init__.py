"""VibeVoice: causal convolutions and ConvNeXt blocks, for continuous latents at 7.5 Hz."""

from token2wav.families.vibevoice.config import MODEL_TYPES, WEIGHT_PREFIXES, read

__all__ = ["MODEL_TYPES", "WEIGHT_PREFIXES", "read"]
