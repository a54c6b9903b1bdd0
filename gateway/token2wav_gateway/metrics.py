"""Metrics of the gateway, for Prometheus."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from token2wav_client.listening import THRESHOLDS_MS, Recording

_STALLS = (0.0, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_FACTORS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)
_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


class Metrics:
    """Metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.speaking = gauge("token2wav_gateway_speaking", "Texts that are being spoken.")
        self.held_back = gauge(
            "token2wav_gateway_held_back",
            "Texts whose language model waits, because the client reads its audio slowly.",
        )
        self.sockets = gauge("token2wav_gateway_sockets", "Open WebSockets.")
        self.texts = counter(
            "token2wav_gateway_texts_total",
            "Texts that ended, by outcome: done, failed, refused or cancelled.",
            ["outcome"],
        )
        self.refused = counter(
            "token2wav_gateway_refused_total",
            "Requests that were refused, by HTTP status.",
            ["status"],
        )
        self.tokens = counter(
            "token2wav_gateway_speech_tokens_total", "Speech tokens that the language model sent."
        )
        self.skipped = counter(
            "token2wav_gateway_skipped_numbers_total",
            "Numbers of the language model that are no speech, by reason: padding, outside (the "
            "vocabulary), or frame (part of a frame that lacks a code).",
            ["reason"],
        )
        for reason in ("padding", "outside", "frame"):
            self.skipped.labels(reason)
        self.cut_off = counter(
            "token2wav_gateway_cut_off_total",
            "Texts that a limit ended, by end reason: length, repeats or silence.",
            ["reason"],
        )
        for reason in ("length", "repeats", "silence"):
            self.cut_off.labels(reason)
        self.audio_seconds = counter(
            "token2wav_gateway_audio_seconds_total", "Seconds of audio that the speech server sent."
        )
        self.alignments = counter(
            "token2wav_gateway_alignments_total",
            "Texts whose words were aligned, by outcome: done, failed, late, refused or long.",
            ["outcome"],
        )
        self.first_token = histogram(
            "token2wav_gateway_first_token_seconds",
            "Time from the text to its first speech token.",
            buckets=_SECONDS,
        )
        self.ttfp = histogram(
            "token2wav_gateway_audio_ttfp_s",
            "Time to the first packet of audio, in seconds since the text arrived.",
            buckets=_SECONDS,
        )
        self.rtf = histogram(
            "token2wav_gateway_audio_rtf",
            "Time from the text to its last audio, divided by the duration of the audio.",
            buckets=_FACTORS,
        )
        self.underrun = histogram(
            "token2wav_gateway_audio_underrun_s",
            "Longest stall of a player that starts with the first audio, in seconds.",
            buckets=_STALLS,
        )
        self.continuity = counter(
            "token2wav_gateway_audio_continuity_ok_total",
            "Texts of several chunks whose longest stall is within a threshold.",
            ["threshold_ms"],
        )
        for threshold in THRESHOLDS_MS:
            self.continuity.labels(threshold)
        self.first_audio = histogram(
            "token2wav_gateway_first_audio_seconds",
            "Time from the text to its first audio.",
            buckets=_SECONDS,
        )

    def count_playback(self, played: Recording) -> None:
        """Counts a text whose audio is complete, as vLLM-Omni and SGLang-Omni count it.

        Args:
            played: audio as it arrived. Its end counts from the text.
        """
        if played.real_time_factor is not None:
            self.rtf.observe(played.real_time_factor)
        if (stall_s := played.largest_stall_s) is None:
            return
        self.underrun.observe(stall_s)
        for threshold in THRESHOLDS_MS:
            if stall_s <= threshold / 1000:
                self.continuity.labels(threshold).inc()
