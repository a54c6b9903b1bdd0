"""CosyVoice2: its folder. The flow is a conformer and a U-Net; the vocoder is HiFT with centred
convolutions.
"""

from token2wav.families.cosyvoice2.config import FILES, read

__all__ = ["DOWNLOADS", "FILES", "read"]

DOWNLOADS = (
    "cosyvoice2.yaml|cosyvoice.yaml",
    "flow.safetensors|flow.pt",
    "hift.safetensors|hift.pt",
)
