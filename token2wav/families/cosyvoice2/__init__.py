"""CosyVoice2 and MOSS-Speech: their folders. The flow is a conformer and a U-Net; the vocoder is
HiFT with centred convolutions.
"""

from token2wav.families.cosyvoice2.config import CHUNK_WEIGHTS, FILES, read

__all__ = ["CHUNK_WEIGHTS", "DOWNLOADS", "FILES", "read"]

DOWNLOADS = (
    "cosyvoice2.yaml|cosyvoice.yaml|config.yaml",
    f"{CHUNK_WEIGHTS}|flow.safetensors|flow.pt",
    "hift.safetensors|hift.pt",
)
