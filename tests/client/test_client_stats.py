"""Totals of an utterance, and both ways to print them."""

from __future__ import annotations

import json

import pytest

from token2wav_client.stats import ChunkTiming, as_json, as_table, summarize


def timing(index: int, seconds: float, arrival_s: float) -> ChunkTiming:
    return ChunkTiming(index, round(seconds * 24_000), arrival_s, 0.1, None if index == 0 else 0.2)


def test_audio_faster_than_playback_has_no_underrun() -> None:
    stats = summarize([timing(0, 1.0, 0.5), timing(1, 2.0, 1.4), timing(2, 1.0, 3.5)])
    assert stats.audio_s == pytest.approx(4.0)
    assert stats.first_audio_s == 0.5
    assert stats.total_s == 3.5
    assert stats.real_time_factor == pytest.approx(0.875)
    assert (stats.underruns, stats.stalled_s) == (0, 0.0)


def test_every_late_chunk_is_an_underrun_and_shifts_the_playback() -> None:
    # Played: 0.5-1.5, silence to 2.0, 2.0-3.0, on time, 3.0-4.0, silence to 4.25.
    stats = summarize([timing(0, 1, 0.5), timing(1, 1, 2.0), timing(2, 1, 2.9), timing(3, 1, 4.25)])
    assert stats.underruns == 2
    assert stats.stalled_s == pytest.approx(0.75)


def test_no_audio_has_no_times() -> None:
    stats = summarize([])
    assert (stats.first_audio_s, stats.total_s, stats.real_time_factor) == (None, None, None)
    assert summarize([timing(0, 0, 0.5)]).real_time_factor is None
    assert "time to first audio  - s" in as_table(stats)


def test_json_holds_everything() -> None:
    report = json.loads(as_json(summarize([timing(0, 1.0, 0.5), timing(1, 1.0, 0.75)])))
    assert report["chunks"][1] == {
        "index": 1,
        "samples": 24_000,
        "arrival_s": 0.75,
        "latency_s": 0.1,
        "gap_s": 0.2,
        "sample_rate": 24_000,
    }
    assert report["chunks"][0]["gap_s"] is None
    assert report["real_time_factor"] == 0.375
    assert report["underruns"] == 0


def test_the_table_has_a_line_per_chunk() -> None:
    lines = as_table(summarize([timing(0, 1.0, 0.5), timing(1, 1.0, 2.0)])).splitlines()
    assert lines[0].split() == ["chunk", "samples", "audio", "s", "arrival", "s", "latency", "s", "gap", "s"]
    assert lines[1].split() == ["0", "24000", "1.000", "0.500", "0.100", "-"]
    assert lines[2].split() == ["1", "24000", "1.000", "2.000", "0.100", "0.200"]
    assert lines[-1].split()[:3] == ["underruns", "1", "(0.500"]
