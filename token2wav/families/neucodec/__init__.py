"""NeuCodec and X-Codec 2, the codecs of NeuTTS and Llasa: one code of finite scalar quantisation, a
transformer that is not causal, and an inverse STFT.
"""

from token2wav.families.neucodec.config import MODEL_TYPES, read

__all__ = ["MODEL_TYPES", "read"]
