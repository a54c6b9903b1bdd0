"""CosyVoice2: its folder, the flow of a conformer and a U-Net, and symmetric HiFT."""

from token2wav.families.cosyvoice2.config import FILES, read

__all__ = ["FILES", "read"]
