"""Gateway of one process: what its requests and its WebSockets share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from token2wav_gateway.access import Access, Holder
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.errors import NotFoundError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.readiness import Readiness
from token2wav_gateway.requests import SpeechFields
from token2wav_gateway.servers import Servers
from token2wav_gateway.settings import Settings
from token2wav_gateway.turn import Codes, Text, Turn
from token2wav_gateway.voices import Voice, VoiceFolder
from token2wav_gateway.word_times import WordTimes


class Gateway:
    """Gateway of one process: its settings, its connections, and the checks of every request."""

    def __init__(self, settings: Settings, access: Access, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.access = access
        self.voices = VoiceFolder(settings.voices)
        self.servers = Servers(settings, metrics)
        self.word_times = WordTimes(settings.aligner, metrics)
        self.readiness = Readiness(self.servers.check)

    async def close(self) -> None:
        """Ends the aligner, and disconnects from both servers."""
        await self.word_times.close()
        await self.servers.close()

    def admitted(self, headers: Mapping[str, str]) -> AbstractContextManager[Holder]:
        """Context manager of a request, within the limits of its key; yields the key's holder.

        Raises as `Access.admitted` does.
        """
        return self.access.admitted(headers.get("authorization"))

    def turn(
        self, said: Text | Codes, encoder: Encoder, *, words: bool = False, **options: Any
    ) -> Turn:
        """Returns a turn.

        Args:
            words: whether it has `Words`.
            options: further arguments of `Turn`.
        """
        word_times = self.word_times if words else None
        return Turn(self.servers, said, encoder, word_times=word_times, **options)

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError for a model that this gateway does not have; None names no model."""
        if name is not None and name not in self.settings.models:
            known = ", ".join(self.settings.models)
            raise NotFoundError(f"model: {name[:64]!r} is not one of: {known}", param="model")

    async def voice_of(self, fields: SpeechFields) -> Voice:
        """Returns the voice of a request: that of its recording, the one that it names, or the
        default voice.

        Raises:
            RequestError: the recording is unusable, or there is no default voice.
            NotFoundError: there is no voice with this name.
            BusyError: too many recordings wait.
        """
        if fields.ref_audio is None:
            return self.voices.get(fields.voice_name)
        return await self.voices.of_recording(
            fields.ref_audio, fields.ref_text, recording_field="ref_audio", text_field="ref_text"
        )
