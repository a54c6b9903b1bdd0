"""VibeVoice: causal convolutions and ConvNeXt blocks, for continuous latents at 7.5 Hz."""

from token2wav.families.vibevoice.config import FILES, LAYOUTS, MODEL_TYPES, read

__all__ = ["FILES", "MODEL_TYPES", "WEIGHT_PREFIXES", "read"]

WEIGHT_PREFIXES = (
    *(layout.prefix for layout in LAYOUTS.values()),
    *(factor for layout in LAYOUTS.values() for factor in layout.factors),
)
