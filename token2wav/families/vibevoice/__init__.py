"""VibeVoice: causal convolutions and ConvNeXt blocks, for continuous latents at 7.5 Hz."""

from token2wav.families.vibevoice.config import FILES, MODEL_TYPES, read

__all__ = ["FILES", "MODEL_TYPES", "read"]
