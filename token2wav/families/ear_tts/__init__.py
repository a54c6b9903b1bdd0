"""EAR-TTS, the codec of Nemotron VoiceChat: ConvNeXt blocks and an inverse STFT."""

from token2wav.families.ear_tts.config import CONFIG_KEYS, PREFIX, read

__all__ = ["CONFIG_KEYS", "WEIGHT_PREFIXES", "read"]

WEIGHT_PREFIXES = (PREFIX,)
