"""CosyVoice1 (CosyVoice-300M) and the decoder of GLM-4-Voice: their folders. The flow is a
conformer, a length regulator and a U-Net, which is not causal; the vocoder is HiFT at 22.05 kHz.
"""

from token2wav.families.cosyvoice1.config import FILES, FLOW, read

__all__ = ["DOWNLOADS", "FILES", "FLOW", "read"]

DOWNLOADS = ("|".join(FILES), "flow.safetensors|flow.pt", "hift.safetensors|hift.pt")
