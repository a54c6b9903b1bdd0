"""Voices of a server: voices that its settings name, and voices that clients send.

The server reads the voices of its settings from files. Clients can request them by name or by id.
The id is a hash of the content. A voice that a client sent can be requested only by its id, because
clients could send two different voices under the same name. This module does not import torch.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from token2wav.config import ServerConfig
from token2wav.config.model_config import ModelConfig
from token2wav.config.values import shown
from token2wav.errors import ConfigError, InputError
from token2wav.voice import Voice

_ID = re.compile("[0-9a-f]{64}")
_MAX_NAMES_LISTED = 20


class VoiceRegistry:
    """Registry of voices, which finds a voice by its id or by its name. It is thread-safe.

    Voices with a name are never evicted. The number of voices without a name is limited: the
    registry evicts the voice that was registered or requested least recently. Open streams are not
    affected, because each stream has its own reference to its voice.

    Args:
        most_voices: most voices without a name.
        named: voices with a name, by name.
    """

    def __init__(self, most_voices: int, named: Mapping[str, Voice]) -> None:
        self._most_voices = most_voices
        self._voices: OrderedDict[str, Voice] = OrderedDict()  # voices without a name, by id
        self._named = named
        self._named_by_id = {voice.content_hash: voice for voice in named.values()}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._voices)

    def register(self, voice: Voice) -> None:
        """Adds a voice without a name. A voice that the registry has already becomes the most
        recently used one.
        """
        voice_id = voice.content_hash
        if voice_id in self._named_by_id:
            return
        with self._lock:
            self._voices[voice_id] = voice
            self._voices.move_to_end(voice_id)
            if len(self._voices) > self._most_voices:
                self._voices.popitem(last=False)

    def get(self, voice_id: str) -> Voice:
        """Returns the voice with an id. Raises InputError if the registry has no such voice."""
        if (voice := self._named_by_id.get(voice_id)) is not None:
            return voice
        with self._lock:
            if (voice := self._voices.get(voice_id)) is None:
                raise InputError(
                    "voice_id", f"'{voice_id}' is not registered here; send the voice itself once"
                )
            self._voices.move_to_end(voice_id)
            return voice

    def named(self, name: str) -> Voice:
        """Returns the voice with a name. Raises InputError if the registry has no such voice; the
        message lists up to 20 names that it has.
        """
        if name in self._named:
            return self._named[name]
        names = [*self._named]
        listed, more = ", ".join(names[:_MAX_NAMES_LISTED]), len(names) - _MAX_NAMES_LISTED
        suffix = f" and {more} others" if more > 0 else ""
        known = "this server has no named voices"
        if names:
            known = f"this server has the voices {listed}{suffix}"
        raise InputError("voice", f"{shown(name)} is unknown; {known}")


def voices_in(config: ServerConfig, model: ModelConfig) -> dict[str, Voice]:
    """Reads the voices of a server from the files in its settings. Returns them by name, which is
    the name of the file without the ending.

    Raises:
        ConfigError: a file cannot be read, does not fit the model, or has a name that cannot be
            used. The message names the file.
    """
    voices: dict[str, Voice] = {}
    for path in map(Path, config.voices):
        name = path.stem
        try:
            if path.suffix not in (".safetensors", ".pt"):
                raise InputError(
                    str(path), "the name of the file ends neither in .safetensors nor in .pt"
                )
            if name in voices:
                raise InputError(str(path), f"another voice has the name {name}")
            if _ID.fullmatch(name) or not name.isprintable():
                raise InputError(str(path), "its name looks like a voice id or is not printable")
            voices[name] = _fitting(path, model)
        except InputError as error:
            raise ConfigError(f"voices: {error}") from error
    return voices


def _fitting(path: Path, model: ModelConfig) -> Voice:
    voice = Voice.load(path)
    try:
        voice.check(model)
    except InputError as error:
        raise InputError(str(path), str(error)) from error
    return voice
