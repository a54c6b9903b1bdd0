"""Metrics of the field: real-time factors and stalls of texts that are complete."""

from __future__ import annotations

import numpy as np
import pytest

from token2wav_client.listening import Recording
from token2wav_gateway.metrics import Metrics


def test_metrics_of_texts_that_are_complete() -> None:
    metrics = Metrics()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"token2wav_gateway_audio_{name}", labels)

    def count(arrivals_s: list[float], ended_s: float) -> None:
        """Counts a text of chunks of a second."""
        samples = np.full(len(arrivals_s), 24_000)
        metrics.count_playback(Recording(np.array(arrivals_s), samples, 24_000, ended_s))

    assert value("continuity_ok_total", threshold_ms="100") == 0
    count([0.3, 1.36], 1.5)
    count([0.3], 0.5)  # one chunk cannot stall
    count([], 0.5)
    counts = [value("continuity_ok_total", threshold_ms=ms) for ms in ("50", "100", "200")]
    assert counts == [0, 1, 1]
    assert value("underrun_s_count") == 1
    assert value("underrun_s_sum") == pytest.approx(0.06)
    assert value("rtf_count") == 2
    assert value("rtf_sum") == pytest.approx(0.75 + 0.5)
