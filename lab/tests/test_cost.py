"""Cost of computing: the programs run on the tiny model."""

from __future__ import annotations

from lab.cost import random_model, run_stream, throughput_of
from testkit.models.golden import TINY
from token2wav.published.registry import read_config


def test_throughput_needs_no_model_folder() -> None:
    row = throughput_of(random_model(read_config(TINY)), 2)
    assert (row["streams"], row["chunk_seconds"]) == (2, 1.0)
    median, least, most = row["audio_seconds_per_second"]
    assert 0 < least <= median <= most


def test_a_stream_has_the_time_of_every_chunk() -> None:
    run = run_stream((TINY, "tiny", "incremental", 3))
    assert run.position_s[-1] == 3.0
    assert len(run.flow_s) == len(run.vocoder_s) == len(run.position_s) == len(run.rss_mib)
    assert min(run.flow_s) > 0
