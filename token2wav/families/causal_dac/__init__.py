"""The causal DAC of Fish Audio and Audio8: residual codebooks, a causal transformer with a sliding
window, and the decoder of DAC with causal convolutions.
"""

from token2wav.families.causal_dac.config import FILES, MODEL_TYPES, read

__all__ = ["DOWNLOADS", "FILES", "MODEL_TYPES", "read"]

DOWNLOADS = ("config.json", *FILES)
