"""NanoCodec, the codec of NVIDIA Magpie and Kani TTS: groups of finite scalar quantisation, and a
causal HiFi-GAN as decoder.
"""

from token2wav.families.nanocodec.config import FILES, read

__all__ = ["DOWNLOADS", "FILES", "read"]

DOWNLOADS = (
    "*.nemo|model_config.yaml",
    "*.nemo|model_weights.safetensors|model.safetensors|model_weights.ckpt",
)
