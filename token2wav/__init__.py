"""Streaming token-to-speech: converts discrete speech tokens to audio while they arrive.

The sample rate is the model's, 24 kHz for CosyVoice3.

Example:
    model = Token2Wav.load("CosyVoice3-folder")
    stream = model.stream(Voice(prompt_tokens, prompt_mel, speaker_embedding))
    for chunk in stream.push(tokens) + stream.finish():
        play(chunk.audio)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from token2wav.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
)

if TYPE_CHECKING:
    from token2wav.config import RuntimeConfig, StreamConfig
    from token2wav.model import Token2Wav
    from token2wav.serving.audio_output import AudioChunk
    from token2wav.serving.options import UtteranceOptions
    from token2wav.serving.stream import Stream
    from token2wav.voice import Voice

_LAZY = {  # names from modules that need torch or YAML, imported at their first use
    "AudioChunk": "token2wav.serving.audio_output",
    "RuntimeConfig": "token2wav.config",
    "Stream": "token2wav.serving.stream",
    "StreamConfig": "token2wav.config",
    "Token2Wav": "token2wav.model",
    "UtteranceOptions": "token2wav.serving.options",
    "Voice": "token2wav.voice",
}

__all__ = [
    "AudioChunk",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "InputError",
    "LimitError",
    "RuntimeConfig",
    "Stream",
    "StreamClosedError",
    "StreamConfig",
    "Token2Wav",
    "Token2WavError",
    "UtteranceOptions",
    "Voice",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'token2wav' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
