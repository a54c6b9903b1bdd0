"""Step-Audio2 mini and MiniCPM-o 4.5: their folder, the flow of a conformer and a DiT, and
symmetric HiFT.
"""

from token2wav.families.stepaudio2.config import FILES, read

__all__ = ["FILES", "read"]
