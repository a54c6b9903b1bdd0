"""The codec of Pocket TTS: the decoder of Mimi without codebooks, for continuous latents."""

from token2wav.families.pocket_tts.config import MODEL_TYPES, read

__all__ = ["MODEL_TYPES", "read"]
