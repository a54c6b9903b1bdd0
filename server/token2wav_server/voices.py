"""Voices that a server knows from the start: it reads the files that its settings name, which takes no torch."""

from __future__ import annotations

import re
from pathlib import Path

from token2wav.config import ServerConfig
from token2wav.errors import ConfigError, InputError
from token2wav.model_config import ModelConfig
from token2wav.serving.voices import VoiceRegistry
from token2wav.voice import Voice

_ID = re.compile("[0-9a-f]{64}")


def voices_in(config: ServerConfig, model: ModelConfig) -> dict[str, Voice]:
    """Reads the voices of a server, by their names, which are those of their files without the ending.

    Raises:
        ConfigError: naming the file, which cannot be read, does not fit the model, or has a name that
            cannot be used.
    """
    voices: dict[str, Voice] = {}
    for path in map(Path, config.voices):
        name = path.stem
        try:
            if path.suffix not in (".safetensors", ".pt"):
                raise InputError(str(path), "its name ends neither in .safetensors nor in .pt")
            if name in voices:
                raise InputError(str(path), f"another voice has the name {name}")
            if _ID.fullmatch(name) or not name.isprintable():
                raise InputError(str(path), "its name cannot be told from an id, or not be printed")
            voices[name] = _fitting(path, model)
        except InputError as error:
            raise ConfigError(f"voices: {error}") from error
    return voices


def registry(config: ServerConfig, model: ModelConfig) -> VoiceRegistry:
    """Makes the registry of a server, in which the voices of its settings are known; raises as `voices_in`."""
    voices = VoiceRegistry(config.limits.sent_voices)
    for name, voice in voices_in(config, model).items():
        voices.keep(name, voice)
    return voices


def _fitting(path: Path, model: ModelConfig) -> Voice:
    voice = Voice.load(path)
    try:
        voice.check(model)
    except InputError as error:
        raise InputError(str(path), str(error)) from error
    return voice
