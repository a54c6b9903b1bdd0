"""Totals of an utterance, and both ways to print them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from token2wav.serving.audio_output import ENCODERS
from token2wav_client.audio import AUDIO_FORMATS, AudioChunk, AudioFormat
from token2wav_client.stats import ChunkTiming, as_table, summarize


def timing(index: int, seconds: float, arrival_s: float) -> ChunkTiming:
    return ChunkTiming(index, round(seconds * 24_000), arrival_s, 0.1, None if index == 0 else 0.2)


def test_audio_faster_than_playback_has_no_underrun() -> None:
    stats = summarize([timing(0, 1.0, 0.5), timing(1, 2.0, 1.4), timing(2, 1.0, 3.5)])
    assert stats.audio_s == pytest.approx(4.0)
    assert stats.first_audio_s == 0.5
    assert stats.total_s == 3.5
    assert stats.real_time_factor == pytest.approx(0.875)
    assert (stats.underruns, stats.stalled_s) == (0, 0.0)


def test_late_chunks_are_underruns_and_shift_the_playback() -> None:
    # Played: 0.7-1.7, silence to 2.0, 2.0-3.0, on time, 3.0-4.0, silence to 4.25.
    stats = summarize([timing(0, 1, 0.5), timing(1, 1, 2.0), timing(2, 1, 2.9), timing(3, 1, 4.25)])
    assert stats.underruns == 2
    assert stats.stalled_s == pytest.approx(0.55)


def test_the_first_sound_is_heard_after_silence_and_gaps() -> None:
    chunks = [
        timing(0, 1, 0.5),
        timing(1, 1, 2.0),
        replace(timing(2, 1, 2.1), sound_s=0.25, samples_trimmed=2400),
    ]
    stats = summarize(chunks)
    assert (stats.first_sound_s, stats.trimmed_s) == (3.25, 0.1)
    assert "time to first sound  3.250 s, 0.100 s of silence trimmed" in as_table(stats)


@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
def test_sound_is_ten_milliseconds_above_50_db_below_full_scale(audio_format: AudioFormat) -> None:
    for level, sound_s in ((0.0025, None), (0.0045, 0.05)):  # -55 and -50 dBFS and a bit
        wave = np.zeros(800, np.float32)
        wave[400:] = level * np.sin(np.arange(400)) * 2**0.5
        wave[100] = 0.01  # a click
        audio = ENCODERS[audio_format](wave)
        chunk = AudioChunk(audio, 0, True, 0.0, 0.0, None, 8000, 320, audio_format=audio_format)
        assert ChunkTiming.of(chunk).sound_s == sound_s


def test_sound_in_one_of_two_channels() -> None:
    audio = np.zeros((800, 2), np.float32)
    audio[400:, 1] = 0.0045
    timed = ChunkTiming.of(AudioChunk(audio, 0, True, 0.0, 0.0, None, 8000, 320))
    assert (timed.samples, timed.duration_s, timed.sound_s) == (800, 0.1, 0.05)


def test_silence_has_neither_a_first_sound_nor_a_factor() -> None:
    stats = summarize([timing(0, 0, 0.5)])
    assert (stats.first_sound_s, stats.real_time_factor) == (None, None)
    assert "time to first sound  - s" in as_table(stats)


def test_the_table_has_a_line_per_chunk() -> None:
    lines = as_table(summarize([timing(0, 1.0, 0.5), timing(1, 1.0, 2.0)])).splitlines()
    assert " ".join(lines[0].split()) == "chunk samples audio s arrival s latency s gap s"
    assert lines[1].split() == ["0", "24000", "1.000", "0.500", "0.100", "-"]
    assert lines[2].split() == ["1", "24000", "1.000", "2.000", "0.100", "0.200"]
    assert lines[-1].split()[:3] == ["underruns", "1", "(0.300"]
