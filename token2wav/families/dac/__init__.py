"""DAC, the codec of Zonos, Dia and Parler: residual codebooks, and symmetric convolutions with
Snake.
"""

from token2wav.families.dac.config import DECODER, FILES, MODEL_TYPES, WEIGHTS, read

__all__ = ["DECODER", "FILES", "MODEL_TYPES", "WEIGHTS", "read"]
