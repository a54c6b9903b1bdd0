"""Gateway of one process: what its requests and its WebSockets share."""

from __future__ import annotations

from token2wav_gateway.access import Access
from token2wav_gateway.errors import NotFoundError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.readiness import Readiness
from token2wav_gateway.settings import Settings
from token2wav_gateway.speech import Speech
from token2wav_gateway.voices import VoiceFolder
from token2wav_gateway.word_times import WordTimes


class Gateway:
    """Gateway of one process: its settings, its connections, and the checks of every request."""

    def __init__(self, settings: Settings, access: Access, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.access = access
        self.voices = VoiceFolder(settings.voices)
        self.speech = Speech(settings, metrics)
        self.word_times = WordTimes(settings.aligner, metrics)
        self.readiness = Readiness(self.speech.check)

    def check_model(self, name: str) -> None:
        """Raises NotFoundError for a model that this gateway does not have."""
        if name not in self.settings.models:
            known = ", ".join(self.settings.models)
            raise NotFoundError(f"model: {name[:64]!r} is not one of: {known}", param="model")
