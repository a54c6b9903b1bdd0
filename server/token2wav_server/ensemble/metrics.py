"""What the stages tell, on Triton's own metrics port. Runs inside Triton's Python backend only."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from token2wav.errors import Token2WavError

_STREAMS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


class OpenStreams:
    """The gauge of streams that a stage holds something for.

    Args:
        holder: `flow`, `vocoder`, or `scheduler` for the accumulator, which admits streams as the scheduler of the
            one-process model does.
    """

    def __init__(self, holder: str) -> None:
        # Triton forgets a metric whose family is not referenced; this holds for all families here.
        self._family = pb_utils.MetricFamily(
            name="token2wav_open_streams",
            description="Utterances that are open, by who holds something for them",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._metric = self._family.Metric(labels={"holder": holder})
        self.set(0)

    def set(self, count: int) -> None:
        self._metric.set(count)


class BatchStreams:
    """The histogram of how many streams a stage computed together.

    Args:
        model: name of the stage.
    """

    def __init__(self, model: str) -> None:
        self._family = pb_utils.MetricFamily(
            name="token2wav_batch_streams",
            description="Chunks that were computed together",
            kind=pb_utils.MetricFamily.HISTOGRAM,
        )
        self._metric = self._family.Metric(labels={"model": model}, buckets=_STREAMS)

    def observe(self, count: int) -> None:
        self._metric.observe(count)


class Refused:
    """The counter of requests that the accumulator answered with an error."""

    def __init__(self) -> None:
        self._family = pb_utils.MetricFamily(
            name="token2wav_refused",
            description="Requests that were refused, by what was wrong with them",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._metrics: dict[str, pb_utils.Metric] = {}

    def count(self, error: Token2WavError) -> None:
        """Messages begin with the field or limit."""
        what = str(error).partition(":")[0][:40]
        if what not in self._metrics:
            self._metrics[what] = self._family.Metric(labels={"what": what})
        self._metrics[what].increment(1)
