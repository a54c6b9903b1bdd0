"""Metrics of a model process, the engine or a stage of the ensemble, for Prometheus.

Under the launcher, the values are in the files of a `MetricsFolder`, else in the memory of the
process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)

from token2wav.config.model_config import StageName
from token2wav.errors import Token2WavError, attempt
from token2wav.serving.observer import Observer
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.utterance import Utterance

log = logging.getLogger(__name__)

# Without this call, a registry would export a further line for each counter and histogram.
disable_created_metrics()

_SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0]
_STREAMS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
_FACTORS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0]
# Gauge that exports the sum over the running processes. Modes of prometheus_client that
# do not combine the processes would add a label `pid`.
_SumGauge = partial(Gauge, multiprocess_mode="livesum")
# Metric family that the engine and the stages of the ensemble share.
OPEN_STREAMS = partial(
    _SumGauge,
    "token2wav_open_streams",
    "Open utterances that each part of the server (label owner) still stores",
    ["owner"],
)


class ServerMetrics(Observer):
    """Metrics of the engine and of its cache, and one line in the log for each ended utterance.

    Attributes:
        registry: registry of these metrics, for a metrics port of this process.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.registry = registry = CollectorRegistry()
        gauge = partial(_SumGauge, registry=registry)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        # The gauge of open streams is created before all other metrics, so that its values are the
        # first in the file; `MetricsFolder` gives the reason.
        opened = OPEN_STREAMS(registry=registry)
        self._admitted, self._opened = opened.labels("scheduler"), opened.labels("engine")
        pages = gauge(
            "token2wav_cache_pages",
            "Pages of the cache, by state: capacity, used, shared by prompts of voices, "
            "idle prompts without a stream",
            ["state"],
        )
        self._pages = {
            state: pages.labels(state) for state in ("capacity", "used", "shared", "idle")
        }
        self._bytes = gauge("token2wav_cache_used_bytes", "Memory of the cache pages in use")
        prompts = counter(
            "token2wav_voice_prompts_total",
            "Utterances by the state of the voice's prompt: cached (hit) or computed (miss)",
            ["result"],
        )
        self._prompts = {result: prompts.labels(result) for result in ("hit", "miss")}
        self._prompts_counted = {"hit": 0, "miss": 0}
        self._first = histogram(
            "token2wav_first_audio_seconds",
            "From the admission of an utterance to its first audio",
            buckets=_SECONDS,
        )
        self._sound = histogram(
            "token2wav_first_sound_seconds",
            "From the admission of an utterance to its first 10 ms above -50 dBFS, if played at "
            "once",
            buckets=_SECONDS,
        )
        self._provisional = gauge(
            "token2wav_provisional_streams", "Open utterances that may compute provisional chunks"
        )
        starts = counter(
            "token2wav_starts_total",
            "Utterances with a first chunk, by its kind: provisional or whole",
            ["kind"],
        )
        self._starts = {False: starts.labels("whole"), True: starts.labels("provisional")}
        self._stages = histogram(
            "token2wav_chunk_seconds",
            "Time of a chunk in each stage: wait, and flow and vocoder, or decoder of a codec",
            ["stage"],
            buckets=_SECONDS,
        )
        self._batches = histogram(
            "token2wav_batch_streams", "Chunks in each batch", buckets=_STREAMS
        )
        self._factor = histogram(
            "token2wav_real_time_factor",
            "Computing time of an utterance's batches divided by the length of its audio",
            buckets=_FACTORS,
        )
        self._underruns = counter(
            "token2wav_underruns_total",
            "Chunks that were sent after the player had run out of audio",
        )
        self._audio = counter("token2wav_audio_seconds_total", "Audio sent to clients")
        self._ended = counter(
            "token2wav_streams_ended_total", "Ended utterances, by reason", ["reason"]
        )
        self._canary = gauge(
            "token2wav_canary_seconds",
            "Time of the launcher's latest test synthesis in this model",
            multiprocess_mode="livemax",
        )
        gauge(
            "token2wav_start_time_seconds",
            "Unix time at which the model was loaded; a new value follows a restart",
            multiprocess_mode="livemax",
        ).set_to_current_time()
        self._refused = counter(
            "token2wav_refused_total", "Rejected requests, by the rejected field", ["what"]
        )
        self.changed(0)

    def admitted(self, open_utterances: int) -> None:
        # Updated at once: `TritonServer.drain` ends the server as soon as this gauge is 0.
        self._admitted.set(open_utterances)

    def changed(self, open_utterances: int) -> None:
        usage = self._pipeline.usage()
        for state, gauge in self._pages.items():
            gauge.set(getattr(usage, state))
        self._bytes.set(usage.used * usage.page_bytes)
        for result, count in (("hit", usage.prompt_hits), ("miss", usage.prompt_misses)):
            self._prompts[result].inc(count - self._prompts_counted[result])
            self._prompts_counted[result] = count
        self._provisional.set(self._pipeline.load.provisional_streams)
        # The gauges of open streams are set last. Once a reader of the metrics port sees that no
        # stream is open, all other values are up to date.
        self._opened.set(self._pipeline.open_streams)
        self._admitted.set(open_utterances)

    def on_batch(self, waited: list[float], stages: Mapping[StageName, float]) -> None:
        self._batches.observe(len(waited))
        for seconds in waited:
            self._stages.labels("wait").observe(seconds)
        for stage, seconds in stages.items():
            self._stages.labels(stage).observe(seconds)

    def refused(self, error: Token2WavError) -> None:
        # Counted by the field or limit with which the message begins. The error is returned to the
        # client only after this call, and a new label may fail, as in `ended`.
        what = str(error).partition(":")[0][:40]
        attempt(lambda: self._refused.labels(what).inc())

    def sent(self, utterance: Utterance, seconds: float, late: float) -> None:
        self._audio.inc(seconds)
        self._underruns.inc(late > 0)
        if utterance.playback.seconds_sent == seconds and utterance.playback.started is not None:
            self._first.observe(utterance.playback.started - utterance.admitted)
            self._starts[utterance.chunker.next_provisional].inc()

    def ended(self, utterance: Utterance, reason: str) -> None:
        playback = utterance.playback
        if utterance.canary:
            self._canary.set(playback.now() - utterance.admitted)
        factor = utterance.compute_seconds / playback.seconds_sent if playback.seconds_sent else 0.0
        if playback.seconds_sent:
            self._factor.observe(factor)
        first, sound = (
            None if since is None else round(since - utterance.admitted, 3)
            for since in (playback.started, playback.sound_since)
        )
        if sound is not None:
            self._sound.observe(sound)
        canary = "canary " if utterance.canary else ""
        log.info(
            f"{canary}stream={utterance.number} reason={reason} "
            f"tokens={utterance.chunker.new_tokens} audio_s={playback.seconds_sent:.2f} "
            f"first_audio_s={first} first_sound_s={sound} real_time_factor={factor:.3f} "
            f"underruns={playback.underruns}"
        )
        # The counter comes last, because a new label may fail: the file of the metrics may have to
        # grow, and the disk may be full.
        self._ended.labels(reason).inc()
