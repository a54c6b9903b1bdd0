"""Chatterbox: its folder with S3Gen. The flow is a conformer and a U-Net, in Chatterbox Turbo with
a MeanFlow; the vocoder is the HiFT of earlier generations.
"""

from token2wav.families.chatterbox.config import FILES, read

__all__ = ["DOWNLOADS", "FILES", "read"]

DOWNLOADS = ("|".join(FILES), "conds.pt")
