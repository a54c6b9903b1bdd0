"""Arrival times of tokens, and the number of streams whose provisional chunks the workers compute
in time.
"""

from __future__ import annotations

import pytest

from token2wav.serving.clocks import SLOW_SECONDS, Arrivals, PipelineLoad


class Stream:
    """Stream that asks for provisional chunks."""


@pytest.mark.parametrize(
    ("batches", "most"), [({1: 0.02}, 2), ({1: 0.02, 3: 0.04}, 3), ({1: 0.005, 9: 0.006}, 100)]
)
def test_streams_that_the_workers_compute_in_time(batches: dict[int, float], most: int) -> None:
    load = PipelineLoad()
    load.record_batch(1, 3.0)  # the first measurement does not count
    for _ in range(100):
        for chunks, seconds in batches.items():
            load.record_batch(chunks, seconds)
    streams = [Stream() for _ in range(100)]
    assert sum(load.try_admit_provisional(stream) for stream in streams) == most
    assert load.provisional_streams == most
    del streams
    assert load.try_admit_provisional(Stream())  # the others are gone


def test_no_stream_is_admitted_while_chunks_take_long() -> None:
    load, stream = PipelineLoad(), Stream()
    assert load.try_admit_provisional(stream)
    for _ in range(30):
        load.delayed(2 * SLOW_SECONDS)
    assert not load.try_admit_provisional(stream)


def test_arrivals_tell_pace_and_rhythm() -> None:
    arrivals = Arrivals()
    assert arrivals.token_seconds(3.0) == 0
    for at in (1.0, 1.2, 1.4):
        arrivals.add(5, at)
    assert arrivals.token_seconds(1.4) == pytest.approx(0.04)
    assert arrivals.token_seconds(1.8) == pytest.approx(0.08)  # a stall slows them down
    assert arrivals.seconds_until_next(1.5) == pytest.approx(0.1)
    assert arrivals.seconds_until_next(2.0) == 0
