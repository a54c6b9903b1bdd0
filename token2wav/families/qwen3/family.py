"""Family of Qwen3-TTS's tokenizer and Qwen3-Omni's Code2Wav."""

from token2wav.families.codec_family import CodecFamily
from token2wav.families.qwen3.config import WEIGHTS
from token2wav.families.qwen3.network import Qwen3Decoder

FAMILY = CodecFamily(Qwen3Decoder, WEIGHTS)
