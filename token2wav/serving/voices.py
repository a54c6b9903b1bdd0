"""Registry of voices: it keeps those that streams may name instead of sending them.

What clients send is known by its hash alone: a name or a text would be somebody's promise that two voices are the same.
Names belong to the voices that whoever runs the server keeps there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from token2wav.config_values import shown
from token2wav.errors import InputError
from token2wav.voice import Voice

_MOST_NAMES_TOLD = 20


class VoiceRegistry:
    """Registry of voices by their id, and of some by a name too; several threads may use it.

    Those that have a name stay. When there are too many others, the one goes first that was registered or asked for
    least recently. Streams hold their voice themselves, so that losing it here does not touch them.

    Args:
        most_voices: largest number of voices that are kept, those with a name apart.
        most_bytes: most bytes that these may take together; a voice larger than that is not kept at all.
    """

    def __init__(self, most_voices: int, most_bytes: int) -> None:
        self._most_voices = most_voices
        self._most_bytes = most_bytes
        self._voices: OrderedDict[str, Voice] = OrderedDict()
        self._bytes = 0
        self._kept: dict[str, Voice] = {}  # for good, by their ids
        self._ids: dict[str, str] = {}  # of these, by their names
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._voices)

    @property
    def bytes(self) -> int:
        """Memory that the voices without a name take together."""
        return self._bytes

    def keep(self, name: str, voice: Voice, prepared: Voice | None = None) -> None:
        """Keeps a voice for good, under a name as well as its id.

        Args:
            name: name that no other voice has.
            voice: voice that the id stands for.
            prepared: voice that streams use, if that is another.
        """
        with self._lock:
            self._ids[name] = voice.content_hash
            self._kept[voice.content_hash] = prepared or voice

    def register(self, voice: Voice, prepared: Voice | None = None) -> str:
        """Keeps a voice and returns its id. Harmless when it is kept already.

        Args:
            voice: voice as it was sent, which the id stands for.
            prepared: voice that streams use, if that is another.
        """
        voice_id, kept = voice.content_hash, prepared or voice
        with self._lock:
            if voice_id in self._kept:
                return voice_id
            self._remove(voice_id)
            if kept.nbytes <= self._most_bytes:
                self._voices[voice_id] = kept
                self._bytes += kept.nbytes
            while len(self._voices) > self._most_voices or self._bytes > self._most_bytes:
                self._remove(next(iter(self._voices)))
        return voice_id

    def get(self, voice_id: str) -> Voice:
        """Returns the voice with an id, as streams use it.

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
        """Returns the voice with a name, as streams use it.

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

    def _remove(self, voice_id: str) -> None:
        if (voice := self._voices.pop(voice_id, None)) is not None:
            self._bytes -= voice.nbytes
