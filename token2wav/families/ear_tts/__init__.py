"""EAR-TTS, the codec of Nemotron VoiceChat: ConvNeXt blocks and an inverse STFT."""

from token2wav.families.ear_tts.config import CONFIG_KEYS, FILES, PREFIX, read

__all__ = ["CONFIG_KEYS", "FILES", "WEIGHT_PREFIXES", "read"]

WEIGHT_PREFIXES = (PREFIX,)
