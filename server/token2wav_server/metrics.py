"""Metrics of the scheduler and the ensemble's stages, on Triton's own metrics port.

A metric of `triton_python_backend_utils` passes each value through a piece of shared memory that
belongs to the metric object, and releases Python's global lock meanwhile. If two threads use a
metric at the same time, each thread reads the memory of the other. Then values are lost, requests
fail with `TRITONSERVER_METRIC_KIND_COUNTER does not support Observe`, or the process crashes (seen
with servers up to 2.51). So one lock guards all metrics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from token2wav.config.model_config import StageName
from token2wav.errors import Token2WavError
from token2wav.model import Token2Wav
from token2wav.serving.request import Request
from token2wav.serving.request_pool import Observer

log = logging.getLogger(__name__)

_SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0]
_STREAMS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
_FACTORS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0]
# Arguments of the families that the one-process model and the ensemble's stages both have.
_OPEN_STREAMS = (
    "open_streams",
    "Open utterances that each part of the server (label owner) still stores",
    "GAUGE",
)
_FIRST_AUDIO = (
    "first_audio_seconds",
    "From the admission of an utterance to its first audio",
    "HISTOGRAM",
    _SECONDS,
)
_FIRST_SOUND = (
    "first_sound_seconds",
    "From the admission of an utterance to its first 10 ms above -50 dBFS, if played at once",
    "HISTOGRAM",
    _SECONDS,
)
_STARTS = (
    "starts_total",
    "Utterances with a first chunk, by its kind: provisional or whole",
    "COUNTER",
)
_BATCH_STREAMS = ("batch_streams", "Chunks in each batch", "HISTOGRAM", _STREAMS)
_REFUSED = ("refused_total", "Rejected requests, by the rejected field", "COUNTER")
_START_KINDS = {False: "whole", True: "provisional"}
_LOCK = threading.Lock()


class Family:
    """Family of metrics that have the same name and differ in their labels. It is thread-safe.

    Args:
        name: name on the metrics port, without `token2wav_`. The name of a counter ends with
            `_total`.
        description: help text on the metrics port.
        kind: GAUGE, COUNTER or HISTOGRAM.
        buckets: upper bounds of a histogram's buckets.
    """

    def __init__(
        self, name: str, description: str, kind: str, buckets: list[float] | None = None
    ) -> None:
        self._buckets = {} if buckets is None else {"buckets": buckets}
        self._method = {"GAUGE": "set", "COUNTER": "increment", "HISTOGRAM": "observe"}[kind]
        self._metrics: dict[tuple[str, ...], Any] = {}
        families = pb_utils.MetricFamily
        # The family is stored, because Triton drops a metric whose family is not referenced.
        with _LOCK:
            self._family = families(
                name=f"token2wav_{name}", description=description, kind=getattr(families, kind)
            )

    def record(self, value: float, **labels: str) -> None:
        """Records a value in the metric with these labels.

        The value sets a gauge, is added to a counter, or is counted in a histogram. The metric is
        created with its first value.
        """
        key = tuple(labels.values())
        try:
            with _LOCK:
                if key not in self._metrics:
                    self._metrics[key] = self._family.Metric(labels=labels, **self._buckets)
                getattr(self._metrics[key], self._method)(value)
        except Exception:  # a failure of metrics must not fail a request
            log.warning("a metric could not be recorded", exc_info=True)


class ServerMetrics(Observer):
    """Metrics of the one-process model and its cache.

    It also logs one line for each utterance that ends.
    """

    def __init__(self, model: Token2Wav) -> None:
        self._model = model
        self._open = Family(*_OPEN_STREAMS)
        self._pages = Family(
            "cache_pages",
            "Pages of the cache, by state: capacity, used, shared by prompts of voices, "
            "idle prompts without a stream",
            "GAUGE",
        )
        self._bytes = Family("cache_used_bytes", "Memory of the cache pages in use", "GAUGE")
        self._voices = Family(
            "voice_prompts_total",
            "Utterances by the state of the voice's prompt: cached (hit) or computed (miss)",
            "COUNTER",
        )
        self._prompts_recorded = {"hit": 0, "miss": 0}
        self._first, self._sound = Family(*_FIRST_AUDIO), Family(*_FIRST_SOUND)
        self._provisional = Family(
            "provisional_streams", "Open utterances that may compute provisional chunks", "GAUGE"
        )
        self._starts = starts()
        self._stages = Family(
            "chunk_seconds",
            "Time of a chunk in each stage: waiting, flow, vocoder",
            "HISTOGRAM",
            _SECONDS,
        )
        self._batches = Family(*_BATCH_STREAMS)
        self._factor = Family(
            "real_time_factor",
            "Computing time of an utterance's batches divided by the length of its audio",
            "HISTOGRAM",
            _FACTORS,
        )
        self._underruns = Family(
            "underruns_total",
            "Chunks that were sent after the player had run out of audio",
            "COUNTER",
        )
        self._audio = Family("audio_seconds_total", "Audio sent to clients", "COUNTER")
        self._ended = Family("streams_ended_total", "Ended utterances, by reason", "COUNTER")
        self._canary = Family(
            "canary_seconds", "Time of the launcher's latest test synthesis in this model", "GAUGE"
        )
        self._refused = refusals()
        # Sums of the chunks that were sent since `_record_sent`. Recording a value takes about as
        # long as sending a chunk, so the counters get one value for all chunks of a batch.
        self._sent_lock = threading.Lock()
        self._sent_seconds, self._sent_late = 0.0, 0
        self._underruns.record(0)
        self._audio.record(0)
        self._canary.record(0)
        self.changed(0)

    def admitted(self, open_requests: int) -> None:
        # A server that drains must not seem to be empty.
        self._open.record(open_requests, owner="scheduler")

    def changed(self, open_requests: int) -> None:
        self._record_sent()
        usage = self._model.pipeline.usage()
        for state in ("capacity", "used", "shared", "idle"):
            self._pages.record(getattr(usage, state), state=state)
        self._bytes.record(usage.used * usage.page_bytes)
        for result, count in (("hit", usage.prompt_hits), ("miss", usage.prompt_misses)):
            self._voices.record(count - self._prompts_recorded[result], result=result)
            self._prompts_recorded[result] = count
        self._provisional.record(self._model.pipeline.load.provisional_streams)
        # These gauges are set last. Once a reader of the metrics port sees that no stream is open,
        # all other values are up to date.
        self._open.record(self._model.pipeline.open_streams, owner="engine")
        self._open.record(open_requests, owner="scheduler")

    def on_batch(self, waited: list[float], stages: Mapping[StageName, float]) -> None:
        self._batches.record(len(waited))
        for seconds in waited:
            self._stages.record(seconds, stage="wait")
        for stage, seconds in stages.items():
            self._stages.record(seconds, stage=stage)

    def refused(self, error: Token2WavError) -> None:
        self._refused(error)

    def sent(self, request: Request, seconds: float, late: float) -> None:
        with self._sent_lock:
            self._sent_seconds += seconds
            self._sent_late += late > 0
        if request.playback.seconds_sent == seconds and request.playback.started is not None:
            self._first.record(request.playback.started - request.admitted)
            self._starts(request.next_provisional)

    def delivered(self) -> None:
        self._record_sent()

    def _record_sent(self) -> None:
        with self._sent_lock:
            seconds, late = self._sent_seconds, self._sent_late
            self._sent_seconds, self._sent_late = 0.0, 0
        if seconds:
            self._audio.record(seconds)
        if late:
            self._underruns.record(late)

    def ended(self, request: Request, reason: str) -> None:
        self._ended.record(1, reason=reason)
        playback, tokens = request.playback, request.chunker.new_tokens
        if request.canary:
            self._canary.record(playback.now() - request.admitted)
        factor = request.compute_seconds / playback.seconds_sent if playback.seconds_sent else 0.0
        if playback.seconds_sent:
            self._factor.record(factor)
        first, sound = (
            None if since is None else round(since - request.admitted, 3)
            for since in (playback.started, playback.sound_since)
        )
        if sound is not None:
            self._sound.record(sound)
        log.info(
            "%sstream=%d reason=%s tokens=%d audio_s=%.2f first_audio_s=%s first_sound_s=%s "
            "real_time_factor=%.3f "
            "underruns=%d",
            *(
                "canary " if request.canary else "",
                request.number,
                reason,
                tokens,
                playback.seconds_sent,
                first,
                sound,
                factor,
                playback.underruns,
            ),
        )


def open_streams(owner: str) -> Callable[[int], None]:
    """Creates the gauge of the streams that are open in a stage.

    Args:
        owner: label of the stage: `flow`, `vocoder`, or `scheduler` for the accumulator, which
            admits streams as the scheduler of the one-process model does.

    Returns:
        A function that sets the gauge.
    """
    change = partial(Family(*_OPEN_STREAMS).record, owner=owner)
    change(0)
    return change


def batch_streams(model: str) -> Callable[[int], None]:
    """Creates the histogram of the streams in each batch of a stage.

    Args:
        model: name of the stage's model in Triton, a label of the metric.

    Returns:
        A function that records the streams of one batch.
    """
    return partial(Family(*_BATCH_STREAMS).record, model=model)


def starts() -> Callable[[bool], None]:
    """Creates the counter of the first chunks of utterances, by their kind.

    Returns:
        A function that counts a first chunk. Its argument is whether the chunk is provisional.
    """
    family = Family(*_STARTS)
    for kind in _START_KINDS.values():
        family.record(0, kind=kind)
    return lambda provisional: family.record(1, kind=_START_KINDS[provisional])


def first_audio() -> Callable[[str, float], None]:
    """Creates the histograms of the first audio and the first sound of utterances.

    Returns:
        A function that records the seconds since the admission of an utterance. Its first argument
        is `audio` or `sound`.
    """
    families = {"audio": Family(*_FIRST_AUDIO), "sound": Family(*_FIRST_SOUND)}
    return lambda kind, seconds: families[kind].record(seconds)


def refusals() -> Callable[[Token2WavError], None]:
    """Creates the counter of requests that were answered with an error.

    Errors are counted by the field or limit with which their message begins.

    Returns:
        A function that counts an error.
    """
    family = Family(*_REFUSED)
    return lambda error: family.record(1, what=str(error).partition(":")[0][:40])
