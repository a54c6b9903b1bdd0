"""Definitions of the field and of this project, on recordings made by hand.

Each row names a recording and what every measure of it must be, worked out with pencil and paper.
Chunks are written as arrival:duration, in milliseconds since time zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from testkit.tables import table
from token2wav_client.listening import (
    Recording,
    audible_onset,
    buffered,
    continuity,
    playback_starts,
    record,
    stalls,
)

RATE = 8000
# name: chunks, and the end of the response; an incomplete utterance has a star
RECORDINGS = {
    "on time": "300:200 450:500 900:300, 920",
    "all at once": "300:2000, 310",
    "at the last moment": "200:100 300:100 400:100, 400",
    # The player runs dry at 300, 460 and 620 ms.
    "three stalls of 60": "200:100 360:100 520:100 680:100, 700",
    "a stall of 180": "200:100 480:100 580:100, 600",
    # After the stall the clock has moved on: the third chunk is due at 600, not at 400 ms.
    "late, then early": "200:100 500:100 550:100, 560",
    "stalls of 50, 100": "0:100 150:100 350:100, 400",
    "cut off": "200:100 260:100, 900*",
    "no audio": ", 500*",
}
# largest stall and number of stalls; C50, C100, C200; gap-free start; buffer 50, 100, 200;
# real-time factor, and without the time to the first chunk
MEASURES = table(
    """
on time            | 0   | 0 | 1 1 1 | 300 | 1 1 1 | 0.92  | 0.62
all at once        | -   | 0 | - - - | 300 | 1 1 1 | 0.155 | 0.005
at the last moment | 0   | 0 | 1 1 1 | 200 | 1 1 1 | 1.333 | 0.667
three stalls of 60 | 60  | 3 | 0 1 1 | 380 | 0 0 1 | 1.75  | 1.25
a stall of 180     | 180 | 1 | 0 0 1 | 380 | 0 0 1 | 2.0   | 1.333
late, then early   | 200 | 1 | 0 0 1 | 400 | 0 0 1 | 1.867 | 1.2
stalls of 50, 100  | 100 | 2 | 0 1 1 | 150 | 0 0 1 | 1.333 | 1.333
cut off            | 0   | 0 | - - - | 200 | 0 0 0 | -     | -
no audio           | -   | 0 | - - - | -   | 0 0 0 | -     | -
"""
)


def recording(name: str) -> Recording:
    text, _, end = RECORDINGS[name].rpartition(", ")
    chunks = [tuple(map(int, chunk.split(":"))) for chunk in text.split()]
    return record(
        [
            (arrival / 1000, np.zeros(duration * RATE // 1000, np.int16))
            for arrival, duration in chunks
        ],
        RATE,
        int(end.rstrip("*")) / 1000,
        complete=not end.endswith("*"),
    )


def shown(value: float | None, scale: float = 1) -> str:
    return "-" if value is None else f"{round(scale * value, 3):g}"


@pytest.mark.parametrize(
    ("name", "largest", "count", "c", "gap_free", "buffers", "factor", "streaming"), MEASURES
)
def test_measures_of_an_utterance(
    name: str,
    largest: str,
    count: str,
    c: str,
    gap_free: str,
    buffers: str,
    factor: str,
    streaming: str,
) -> None:
    heard = recording(name)
    assert shown(heard.largest_stall_s, 1000) == largest
    assert str(len(heard.stalls_s)) == count
    assert [shown(continuity([heard], ms)) for ms in (50, 100, 200)] == c.split()
    assert shown(heard.gap_free_start_s, 1000) == gap_free
    assert [shown(buffered([heard], ms)) for ms in (50, 100, 200)] == buffers.split()
    assert shown(heard.real_time_factor) == shown(None if factor == "-" else float(factor))
    assert shown(heard.streaming_real_time_factor) == shown(
        None if streaming == "-" else float(streaming)
    )


def test_three_stalls_pass_c100_of_the_field_and_fail_buffer_100() -> None:
    heard = recording("three stalls of 60")
    assert heard.stalls_s == [0.06, 0.06, 0.06]
    assert heard.buffer_s == 0.18
    assert (continuity([heard], 100), buffered([heard], 100)) == (1.0, 0.0)


def test_chunks_without_samples_are_left_out() -> None:
    empty, sound = np.zeros(0, np.int16), np.ones(800, np.int16)
    heard = record([(0.1, empty), (0.4, sound), (0.7, empty)], RATE, 0.7)
    assert heard.first_playable_s == 0.4
    assert heard.samples.tolist() == [800]
    assert heard.largest_stall_s is None


def tone(level_db: float, count: int = 800) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns a tone of a level in dBFS of its root mean square."""
    wave = np.sin(np.arange(count) * (2 * np.pi / 16)).astype(np.float32)
    return wave * np.float32(2**0.5 * 10 ** (level_db / 20))


SILENCE = np.zeros(800, np.float32)  # 100 ms


@pytest.mark.parametrize(
    ("parts", "onset"),
    [
        ([SILENCE], None),
        ([SILENCE, tone(-45.2)], None),
        # The last window that begins in the silence has half of the tone, 3 dB less.
        ([SILENCE, tone(-44.8)], 800),
        ([SILENCE, tone(-41.5)], 720),
        ([tone(-20)], 0),
        ([SILENCE + 0.5, tone(-60) + 0.5], None),  # without the mean
        # One window of 20 ms is not enough, two in a row are.
        ([SILENCE, tone(-44.8, 160), SILENCE], None),
        ([SILENCE, tone(-44.8, 240), SILENCE], 800),
        ([tone(-20, 239)], None),
        ([tone(-20, 240)], 0),
    ],
)
def test_audible_is_two_windows_above_45_db_below_full_scale(
    parts: list[Any], onset: int | None
) -> None:
    audio = np.concatenate(parts)
    assert audible_onset(audio, RATE) == onset
    assert audible_onset(np.round(audio * 32768).astype(np.int16), RATE) == onset
    assert audible_onset(np.stack([np.zeros_like(audio), audio], axis=1), RATE) == onset


def test_first_audible_is_heard_after_silence_and_stalls() -> None:
    # Played: 200 to 300, 500 to 600 after a stall, 600 to 700 ms.
    chunks = [
        (0.2, SILENCE),
        (0.5, np.concatenate([SILENCE[:400], tone(-20, 400)])),
        (0.55, SILENCE),
    ]
    heard = record(chunks, RATE, 0.6)
    # The onset is the window that begins 10 ms before the tone and has half of it.
    assert heard.onset == 800 + 320
    assert heard.leading_silence_s == 0.14
    assert heard.first_audible_s == pytest.approx(0.54)
    assert recording("on time").first_audible_s is None
    assert recording("on time").leading_silence_s is None


def test_a_player_that_holds_audio_runs_dry_later() -> None:
    arrivals, durations = (1.0, 2.25, 3.5), (1.0, 1.0, 1.0)
    assert stalls(arrivals, durations) == [0.25, 0.25]
    assert stalls(arrivals, durations, 0.3) == [0.2]
    assert stalls(arrivals, durations, 0.5) == []
    assert playback_starts(arrivals, durations, 0.3).tolist() == [1.3, 2.3, 3.5]
    assert stalls((), ()) == []
