"""Metrics of the gateway, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


class Metrics:
    """Metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.speaking = Gauge(
            "token2wav_gateway_speaking",
            "Texts that are being spoken.",
            registry=self.registry,
        )
        self.held_back = Gauge(
            "token2wav_gateway_held_back",
            "Texts whose language model waits, because the client reads its audio slowly.",
            registry=self.registry,
        )
        self.sockets = Gauge(
            "token2wav_gateway_sockets", "Open WebSockets.", registry=self.registry
        )
        self.texts = Counter(
            "token2wav_gateway_texts_total",
            "Texts that ended, by outcome: done, failed, refused or cancelled.",
            ["outcome"],
            registry=self.registry,
        )
        self.refused = Counter(
            "token2wav_gateway_refused_total",
            "Requests that were refused, by HTTP status.",
            ["status"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "token2wav_gateway_speech_tokens_total",
            "Speech tokens that the language model sent.",
            registry=self.registry,
        )
        self.audio_seconds = Counter(
            "token2wav_gateway_audio_seconds_total",
            "Seconds of audio that the speech server sent.",
            registry=self.registry,
        )
        self.first_token = Histogram(
            "token2wav_gateway_first_token_seconds",
            "Time from the text to its first speech token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_audio = Histogram(
            "token2wav_gateway_first_audio_seconds",
            "Time from the text to its first audio.",
            buckets=_SECONDS,
            registry=self.registry,
        )
