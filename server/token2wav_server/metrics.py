"""What the scheduler tells, on Triton's own metrics port."""

from __future__ import annotations

import logging

from token2wav.errors import Token2WavError
from token2wav.model import Token2Wav
from token2wav.utterance import Observer, Utterance
from token2wav_server.metric_family import Family

log = logging.getLogger(__name__)

_SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0]
_STREAMS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
_FACTORS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0]


class ServerMetrics(Observer):
    """Metrics of one model, and a line in the log for every utterance that ends.

    Args:
        model: whose engines are looked at.
    """

    def __init__(self, model: Token2Wav) -> None:
        self._model = model
        self._open = Family("open_streams", "Utterances that are open, by who holds something for them", "GAUGE")
        self._pages = Family("cache_pages", "Pages of the cache: all, in use, and those of voices' prompts", "GAUGE")
        self._bytes = Family("cache_used_bytes", "Memory of the pages in use", "GAUGE")
        self._voices = Family(
            "voice_prompts", "Utterances whose voice's prompt was there, or had to be computed", "GAUGE"
        )
        self._first = Family(
            "first_audio_seconds", "From the admission of an utterance to its first audio", "HISTOGRAM", _SECONDS
        )
        self._stages = Family("chunk_seconds", "Time of a chunk: waiting, in flow, in vocoder", "HISTOGRAM", _SECONDS)
        self._batches = Family("batch_streams", "Chunks that were computed together", "HISTOGRAM", _STREAMS)
        self._factor = Family(
            "real_time_factor", "Per utterance, time of its batches over its audio", "HISTOGRAM", _FACTORS
        )
        self._underruns = Family("underruns", "Chunks sent after the audio before them had ended", "COUNTER")
        self._audio = Family("audio_seconds", "Audio sent", "COUNTER")
        self._ended = Family("streams_ended", "Utterances that are over, by reason", "COUNTER")
        self._refused = Family("refused", "Requests that were refused, by what was wrong with them", "COUNTER")
        self._underruns().increment(0)
        self._audio().increment(0)
        self.changed(0)

    def refused(self, error: Token2WavError) -> None:
        """Counts a request that was answered with an error; messages begin with the field or limit."""
        self._refused(what=str(error).partition(":")[0][:40]).increment(1)

    def changed(self, open_utterances: int) -> None:
        usage = self._model.pipeline.flow.usage()
        for state in ("capacity", "used", "shared"):
            self._pages(state=state).set(getattr(usage, state))
        self._bytes().set(usage.used * usage.page_bytes)
        self._voices(result="hit").set(usage.prompt_hits)
        self._voices(result="miss").set(usage.prompt_misses)
        # Last: who reads that nothing is open reads all the rest of it too.
        self._open(holder="engine").set(self._model.pipeline.open_streams)
        self._open(holder="scheduler").set(open_utterances)

    def computed(self, waited: list[float], flow_seconds: float, vocoder_seconds: float) -> None:
        self._batches().observe(len(waited))
        for seconds in waited:
            self._stages(stage="wait").observe(seconds)
        self._stages(stage="flow").observe(flow_seconds)
        self._stages(stage="vocoder").observe(vocoder_seconds)

    def sent(self, utterance: Utterance, seconds: float, late: float) -> None:
        self._audio().increment(seconds)
        if late > 0:
            self._underruns().increment(1)
        if utterance.seconds_sent == seconds and utterance.heard_since is not None:
            self._first().observe(utterance.heard_since - utterance.admitted)

    def ended(self, utterance: Utterance, reason: str) -> None:
        self._ended(reason=reason).increment(1)
        factor = utterance.compute_seconds / utterance.seconds_sent if utterance.seconds_sent else 0.0
        if utterance.seconds_sent:
            self._factor().observe(factor)
        first = None if utterance.heard_since is None else round(utterance.heard_since - utterance.admitted, 3)
        log.info(
            "stream=%d reason=%s tokens=%d audio_s=%.2f first_audio_s=%s real_time_factor=%.3f underruns=%d",
            *(utterance.number, reason, utterance.tokens, utterance.seconds_sent, first, factor, utterance.underruns),
        )
