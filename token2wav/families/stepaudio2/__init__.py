"""Step-Audio2 mini and MiniCPM-o 4.5: their folder. The flow is a conformer and a DiT; the vocoder
is HiFT with centred convolutions.
"""

from token2wav.families.stepaudio2.config import FILES, read

__all__ = ["DOWNLOADS", "FILES", "read"]

DOWNLOADS = (*FILES, "flow.safetensors|flow.pt", "hift.safetensors|hift.pt")
