"""NanoCodec, the codec of NVIDIA Magpie and Kani TTS: groups of finite scalar quantisation, and a
causal HiFi-GAN as decoder.
"""

from token2wav.families.nanocodec.config import FILES, read

__all__ = ["FILES", "read"]
