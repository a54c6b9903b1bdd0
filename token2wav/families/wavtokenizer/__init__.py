"""WavTokenizer, the codec of OuteTTS: one code of a large codebook, attention, and Vocos."""

from token2wav.families.wavtokenizer.config import FILES, read

__all__ = ["DOWNLOADS", "FILES", "read"]

DOWNLOADS = ("|".join(FILES), "*_v2.ckpt|*.ckpt")
