"""Gateway of one process: the connections and checks that its requests and WebSockets share."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from token2wav_gateway.access import Access, Holder
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.errors import NotFoundError, TooLargeError
from token2wav_gateway.forms import check_length
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings
from token2wav_gateway.speech.content import Codes, Text
from token2wav_gateway.speech.servers import Servers
from token2wav_gateway.speech.turn import Turn
from token2wav_gateway.tracing import trace_headers
from token2wav_gateway.voices.voice_folder import LONGEST_TEXT, Voice, VoiceFolder
from token2wav_gateway.words.word_times import WordTimes


class Caller:
    """Caller of a request, of a session, or of a call: its key, and its trace.

    Args:
        headers: headers of the request, or metadata of the call.
        holder: holder of the key.
    """

    def __init__(self, gateway: Gateway, headers: Mapping[str, str], holder: Holder) -> None:
        self.gateway = gateway
        self.holder = holder
        self._trace = trace_headers(headers)

    def turn(
        self,
        content: Text | Codes,
        audio_format: str,
        rate_hz: int | None = None,
        *,
        whole: bool = False,
        mono: bool = False,
        further: bool = False,
        words: bool = False,
        words_within: Callable[[], float] = lambda: math.inf,
    ) -> Turn:
        """Returns a turn of the caller.

        Args:
            audio_format, rate_hz, whole, mono: see `Encoder`.
            further: whether the turn counts as a further request.
            words: whether the turn has `Words`.
            words_within: see `Turn`.
        """
        return Turn(
            self.gateway.servers,
            content,
            Encoder(audio_format, rate_hz, whole=whole, mono=mono),
            trace=self._trace,
            holder=self.holder if further else None,
            word_times=self.gateway.word_times if words else None,
            words_within=words_within,
        )


class Gateway:
    """Gateway of one process: its settings, its connections, and the checks of every request."""

    def __init__(self, settings: Settings, access: Access, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.access = access
        self.voices = VoiceFolder(settings.voices)
        self.servers = Servers(settings, metrics)
        self.word_times = WordTimes(settings.aligner, metrics)

    async def close(self) -> None:
        """Ends the aligner, and disconnects from both servers."""
        await self.word_times.close()
        await self.servers.close()

    @asynccontextmanager
    async def admitted(self, headers: Mapping[str, str]) -> AsyncIterator[Caller]:
        """Context manager of a request, within the limits of its key. Raises as `Access.admitted`
        does.
        """
        async with self.access.admitted(headers.get("authorization")) as holder:
            yield Caller(self, headers, holder)

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError for a model that this gateway does not have; None names no model."""
        if name is not None and name not in self.settings.models:
            known = ", ".join(self.settings.models)
            raise NotFoundError(f"model: {name[:64]!r} is not one of: {known}", param="model")

    async def voice_of(
        self,
        name: str | None,
        recording: bytes | None,
        text: str,
        recording_field: str = "ref_audio",
        text_field: str = "ref_text",
    ) -> Voice:
        """Returns the voice of a request: that of its recording, the one that it names, or the
        default voice.

        Args:
            text: words of the recording; empty if they are unknown.
            recording_field, text_field: names of both in the request, for messages.

        Raises:
            RequestError: the recording is unusable, or there is no default voice.
            TooLargeError: the text is too long.
            NotFoundError: there is no voice with this name.
            BusyError: too many recordings wait.
        """
        if recording is None:
            return self.voices.get(name)
        check_length(text_field, text, LONGEST_TEXT, TooLargeError)
        return await self.voices.of_recording(recording, text, recording_field)
