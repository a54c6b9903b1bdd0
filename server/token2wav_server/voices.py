"""Voices of a server: those that its settings name are read from files, those that clients send are
kept by their hash.

What clients send is known by its hash alone: a name or a text would be somebody's promise that two
voices are the same. Names belong to the voices that whoever runs the server keeps there. None of it
takes torch.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from pathlib import Path

from token2wav.config import ServerConfig
from token2wav.config.values import shown
from token2wav.errors import ConfigError, InputError
from token2wav.model_config import ModelConfig
from token2wav.voice import Voice

_ID = re.compile("[0-9a-f]{64}")
_MOST_NAMES_TOLD = 20


class VoiceRegistry:
    """Registry of voices by their id, and of some by a name too; several threads may use it.

    Those that have a name stay. When there are too many others, the one goes first that was
    registered or asked for least recently. Streams hold their voice themselves, so that losing it
    here does not touch them.
    """

    def __init__(self, most_voices: int) -> None:
        self._most_voices = most_voices  # those with a name apart
        self._voices: OrderedDict[str, Voice] = OrderedDict()
        self._kept: dict[str, Voice] = {}  # for good, by their ids
        self._ids: dict[str, str] = {}  # of these, by their names
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._voices)

    def keep(self, name: str, voice: Voice) -> None:
        """Keeps a voice for good: it is found by its id, and by `name`, which no other voice may
        have.
        """
        with self._lock:
            self._ids[name] = voice.content_hash
            self._kept[voice.content_hash] = voice

    def register(self, voice: Voice) -> str:
        """Keeps a voice and returns its id. Harmless when it is kept already."""
        voice_id = voice.content_hash
        with self._lock:
            if voice_id in self._kept:
                return voice_id
            self._voices[voice_id] = voice
            self._voices.move_to_end(voice_id)
            if len(self._voices) > self._most_voices:
                self._voices.popitem(last=False)
        return voice_id

    def get(self, voice_id: str) -> Voice:
        """Returns the voice with an id.

        Raises:
            InputError: there is none.
        """
        with self._lock:
            if (kept := self._kept.get(voice_id)) is not None:
                return kept
            if (voice := self._voices.get(voice_id)) is None:
                raise InputError(
                    "voice_id", f"'{voice_id}' is not registered here; send the voice itself once"
                )
            self._voices.move_to_end(voice_id)
            return voice

    def named(self, name: str) -> Voice:
        """Returns the voice with a name.

        Raises:
            InputError: there is none; the message tells the names that there are.
        """
        with self._lock:
            if name in self._ids:
                return self._kept[self._ids[name]]
            names = [*self._ids]
        told, more = ", ".join(names[:_MOST_NAMES_TOLD]), len(names) - _MOST_NAMES_TOLD
        others = f" and {more} others" if more > 0 else ""
        known = (
            f"voices of this server are {told}{others}"
            if names
            else "this server has no named voices"
        )
        raise InputError("voice", f"{shown(name)} is not known here; {known}")


def voices_in(config: ServerConfig, model: ModelConfig) -> dict[str, Voice]:
    """Reads the voices of a server, by their names, which are those of their files without the
    ending.

    Raises:
        ConfigError: naming the file, which cannot be read, does not fit the model, or has a name
            that cannot be used.
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
    """Makes the registry of a server, in which the voices of its settings are known; raises as
    `voices_in`.
    """
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
