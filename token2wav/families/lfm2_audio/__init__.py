"""LFM2-Audio: its audio detokenizer, a causal LFM2 and an inverse STFT."""

from token2wav.families.lfm2_audio.config import FILES, MODEL_TYPES, read

__all__ = ["DOWNLOADS", "FILES", "MODEL_TYPES", "read"]

DOWNLOADS = ("audio_detokenizer/config.json", "audio_detokenizer/model.safetensors")
