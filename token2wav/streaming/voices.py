"""Voices that later streams may name instead of sending them again.

A name or a text would be somebody's promise that two voices are the same; the hash of what was sent is one by itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from token2wav.errors import InputError
from token2wav.voice import Voice


class VoiceRegistry:
    """Voices by their id. Safe to use from several threads.

    When there are too many, the one goes first that was registered or named least recently. Streams hold their voice
    themselves, so that losing it here does not touch them.

    Args:
        most_voices: how many are kept.
        most_bytes: how much they may take together; a voice larger than that is not kept at all.
    """

    def __init__(self, most_voices: int, most_bytes: int) -> None:
        self._most_voices = most_voices
        self._most_bytes = most_bytes
        self._voices: OrderedDict[str, Voice] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._voices)

    @property
    def bytes(self) -> int:
        """What the voices take together."""
        return self._bytes

    def register(self, voice: Voice, prepared: Voice | None = None) -> str:
        """Keeps a voice and returns its id. Harmless when it is kept already.

        Args:
            voice: as it was sent, which is what the id stands for.
            prepared: what streams use of it, if that is not the voice itself.
        """
        voice_id, kept = voice.content_hash, prepared or voice
        with self._lock:
            self._remove(voice_id)
            if kept.nbytes <= self._most_bytes:
                self._voices[voice_id] = kept
                self._bytes += kept.nbytes
            while len(self._voices) > self._most_voices or self._bytes > self._most_bytes:
                self._remove(next(iter(self._voices)))
        return voice_id

    def get(self, voice_id: str) -> Voice:
        """The voice with an id, as streams use it.

        Raises:
            InputError: there is none.
        """
        with self._lock:
            if (voice := self._voices.get(voice_id)) is None:
                raise InputError("voice_id", f"'{voice_id}' is not registered here; send the voice itself once")
            self._voices.move_to_end(voice_id)
            return voice

    def _remove(self, voice_id: str) -> None:
        if (voice := self._voices.pop(voice_id, None)) is not None:
            self._bytes -= voice.nbytes
