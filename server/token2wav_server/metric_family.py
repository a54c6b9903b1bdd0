"""Metrics of Triton that several threads may touch. Runs inside Triton's Python backend only.

A metric of `triton_python_backend_utils` passes each value through a piece of shared memory that belongs to the object,
and lets go of the interpreter meanwhile. Two threads that touch one at the same time read each other's memory: values
get lost, requests fail with `TRITONSERVER_METRIC_KIND_COUNTER does not support Observe`, or the process dies (seen with
servers up to 2.51).
"""

from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils

_ONE_AT_A_TIME = threading.Lock()


class Metric:
    """One value, or one histogram, on the metrics port.

    Args:
        metric: of Triton.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def set(self, value: float) -> None:
        with _ONE_AT_A_TIME:
            self._metric.set(value)

    def increment(self, by: float) -> None:
        with _ONE_AT_A_TIME:
            self._metric.increment(by)

    def observe(self, value: float) -> None:
        with _ONE_AT_A_TIME:
            self._metric.observe(value)


class Family:
    """Metrics that differ in their labels. Triton forgets a metric whose family is not referenced.

    Args:
        name: on the metrics port, without `token2wav_`.
        description: for whoever reads the metrics.
        kind: GAUGE, COUNTER or HISTOGRAM.
        buckets: upper bounds, of a histogram.
    """

    def __init__(self, name: str, description: str, kind: str, buckets: list[float] | None = None) -> None:
        kinds = pb_utils.MetricFamily
        self._buckets = {} if buckets is None else {"buckets": buckets}
        self._metrics: dict[tuple[str, ...], Metric] = {}
        with _ONE_AT_A_TIME:
            self._family = kinds(name=f"token2wav_{name}", description=description, kind=getattr(kinds, kind))

    def __call__(self, **labels: str) -> Metric:
        """The metric with these labels, which is made when it is first asked for."""
        key = tuple(labels.values())
        with _ONE_AT_A_TIME:
            if key not in self._metrics:
                self._metrics[key] = Metric(self._family.Metric(labels=labels, **self._buckets))
            return self._metrics[key]
