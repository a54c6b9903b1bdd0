"""Higgs Audio tokenizer v2, the codec of Higgs Audio v2 and v3 and of OmniVoice: residual codebooks
with projections, and the decoder of DAC.
"""

from token2wav.families.higgs.config import CONFIG_KEYS, MODEL_TYPES, read

__all__ = ["CONFIG_KEYS", "MODEL_TYPES", "WEIGHT_PREFIXES", "read"]

WEIGHT_PREFIXES = ("quantizer.quantizers.", "fc2.", "acoustic_decoder.")
