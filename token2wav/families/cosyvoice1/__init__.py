"""CosyVoice1 (CosyVoice-300M): its folder. The flow is a conformer, a length regulator and a U-Net,
none of them causal; the vocoder is HiFT at 22.05 kHz.
"""

from token2wav.families.cosyvoice1.config import FILES, FLOW, read

__all__ = ["DOWNLOADS", "FILES", "FLOW", "read"]

DOWNLOADS = (*FILES, "flow.safetensors|flow.pt", "hift.safetensors|hift.pt")
