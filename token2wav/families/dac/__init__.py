"""DAC, the codec of Zonos, Dia and Parler: residual codebooks, and symmetric convolutions with
Snake.
"""

from token2wav.families.dac.config import FILES, MODEL_TYPES, read

__all__ = ["FILES", "MODEL_TYPES", "read"]
