"""Registry of voices: it keeps those that streams may name instead of sending them.

What clients send is known by its hash alone: a name or a text would be somebody's promise that two voices are the same.
Names belong to the voices that whoever runs the server keeps there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from token2wav.config.values import shown
from token2wav.errors import InputError
from token2wav.voice import Voice

_MOST_NAMES_TOLD = 20


class VoiceRegistry:
    """Registry of voices by their id, and of some by a name too; several threads may use it.

    Those that have a name stay. When there are too many others, the one goes first that was registered or asked for
    least recently. Streams hold their voice themselves, so that losing it here does not touch them.
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
        """Keeps a voice for good, under a name that no other voice has as well as its id."""
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
                raise InputError("voice_id", f"'{voice_id}' is not registered here; send the voice itself once")
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
        raise InputError(
            "voice", f"{shown(name)} is not known here; voices of this server are {told or 'none'}{others}"
        )
