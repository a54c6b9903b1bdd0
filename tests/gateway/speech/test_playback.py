"""Stalls of a player, and the metrics of the field that count them."""

from __future__ import annotations

import numpy as np
import pytest

from token2wav_client import AudioChunk
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.speech.playback import Playback


def playback_of(*chunks: tuple[float, float]) -> Playback:
    """Plays chunks, each with its arrival and its duration in seconds."""
    playback = Playback()
    for arrival_s, duration_s in chunks:
        audio = np.zeros(round(24_000 * duration_s), np.int16)
        playback.add(AudioChunk(audio, 0, False, arrival_s, 0.0, None, sample_rate=24_000))
    return playback


@pytest.mark.parametrize(
    ("chunks", "underrun_s"),
    [
        ([], 0.0),
        ([(3.0, 1.0)], 0.0),
        ([(0.3, 1.0), (1.2, 1.0)], 0.0),
        ([(0.3, 1.0), (1.36, 1.0), (2.42, 1.0), (3.48, 1.0)], 0.06),  # three stalls of 60 ms
        ([(0.3, 1.0), (1.8, 0.1), (1.9, 1.0), (2.95, 1.0)], 0.5),
        ([(0.3, 1.0), (1.5, 0.0)], 0.0),  # a last chunk without audio
    ],
)
def test_the_longest_stall_of_a_player_that_starts_at_once(
    chunks: list[tuple[float, float]], underrun_s: float
) -> None:
    assert playback_of(*chunks).underrun_s == pytest.approx(underrun_s)


def test_metrics_of_texts_that_are_complete() -> None:
    metrics = Metrics()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"token2wav_gateway_audio_{name}", labels)

    assert value("continuity_ok_total", threshold_ms="100") == 0
    playback_of((0.3, 1.0), (1.36, 1.0)).count(metrics, 1.5)
    playback_of((0.3, 1.0)).count(metrics, 0.5)  # one chunk cannot stall
    playback_of().count(metrics, 0.5)
    counts = [value("continuity_ok_total", threshold_ms=ms) for ms in ("50", "100", "200")]
    assert counts == [0, 1, 1]
    assert value("underrun_s_count") == 1
    assert value("underrun_s_sum") == pytest.approx(0.06)
    assert value("rtf_count") == 2
    assert value("rtf_sum") == pytest.approx(0.75 + 0.5)
