"""Chatterbox: its folder with S3Gen, the flow of a conformer and a U-Net, or of its MeanFlow, and
symmetric HiFT.
"""

from token2wav.families.chatterbox.config import FILES, read

__all__ = ["FILES", "read"]
