"""Load generators: the search for the highest rate without gaps, and the figures of a load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.load.__main__ import main
from benchmarks.load.clients import Load
from benchmarks.load.figures import highest_rate, next_rate, row
from benchmarks.load.listener import Heard
from benchmarks.load.subject import LABELS, model_folder
from testkit.models.codec_row import Codec
from testkit.models.published_codecs import SIXTEENTH
from token2wav.families.dac import DacConfig
from token2wav.published.registry import read_config
from token2wav_client.listening import record

RATE = 8000


def result(rate: float, free_of_gaps: bool) -> dict[str, Any]:
    return {
        "utterances_per_s": rate,
        "utterances": 8,
        "complete": 8,
        "buffer_200": 1.0 if free_of_gaps else 0.875,
        "scheduling_lag_ms": {"p50": 0.0, "p99": 1.0},
    }


@pytest.mark.parametrize(
    ("limit", "measured", "highest"),
    [
        (3.0, [1.0, 2.0, 4.0], 2.0),
        (9.0, [1.0, 2.0, 4.0], 4.0),
        (0.3, [1.0, 0.5, 0.25], 0.25),
        (0.0, [1.0, 0.5, 0.25, 0.125], None),
    ],
)
def test_rates_rise_until_one_has_gaps_or_fall_until_none_has(
    limit: float, measured: list[float], highest: float | None
) -> None:
    rows: list[dict[str, Any]] = []
    while (rate := next_rate([4.0, 1.0, 2.0], rows)) is not None:
        rows.append(result(rate, rate <= limit))
    assert [row["utterances_per_s"] for row in rows] == measured
    assert highest_rate(rows) == highest


def heard(*arrivals_s: float, complete: bool = True) -> Heard:
    """Returns an utterance of chunks of a second; its first chunk took 0.25 s after its tokens."""
    chunks = [(arrival_s, np.zeros(RATE, np.int16)) for arrival_s in arrivals_s]
    return Heard(record(chunks, RATE, arrivals_s[-1], complete=complete), 0.0, 0.25)


def test_a_load_counts_gaps_after_the_buffer_of_the_player_and_complete_utterances_only() -> None:
    load = Load(3, 25.0, buffer_s=0.5)
    # The second chunk is 0.08 s and 0.3 s late for a player that waits 0.5 s.
    utterances = [heard(1.0, 2.58), heard(1.0, 2.8), heard(1.0, complete=False)]
    result = row("batching", load, utterances, 8.0, {"sum": 6.0, "count": 4.0})
    assert result["load"] == "3 clients, 25 tokens/s"
    assert (result["utterances"], result["complete"]) == (3, 2)
    assert result["failed"] == ["incomplete audio"]
    assert result["first_audio_ms"]["p50"] == 250.0
    assert result["first_playable_ms"]["p50"] == 1000.0
    assert result["share_without_gaps"] == {"0.05 s": 0.0, "0.1 s": 0.5, "0.2 s": 0.5}
    assert (result["audio_seconds_per_second"], result["mean_batch"]) == (0.5, 1.5)


def test_starts_of_an_open_loop_are_random_and_those_of_a_closed_loop_are_even() -> None:
    assert Load(4, 25.0, starts_s=2.0).starts() == [0.0, 0.5, 1.0, 1.5]
    starts = Load(0, 25.0, seconds=100.0, utterances_per_s=4.0).starts()
    assert 300 < len(starts) < 500
    assert starts == sorted(starts)
    assert 0 < starts[0] < starts[-1] < 100
    assert np.diff(starts).std() == pytest.approx(0.25, rel=0.2)


def test_every_name_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of codecs are not written, because they have up to 3.5 GB."""
    monkeypatch.setattr(Codec, "write", Codec.write_document)
    names = [*LABELS, *(f"{codec}/16" for codec in SIXTEENTH)]
    configs = {name: read_config(model_folder(name, tmp_path)) for name in names}
    dac = configs["dac"]
    assert isinstance(dac, DacConfig)
    assert dac.sizes.decoder_hidden_size == 512


def test_a_gateway_has_no_ensemble(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--models", "none", "--modes", "batching", "ensemble"]
    monkeypatch.setattr(sys, "argv", ["load", "open", "--gateway", *options])
    with pytest.raises(SystemExit):
        main()
    message = "--gateway asks for token2wav, which --modes ensemble lacks"
    assert capsys.readouterr().err.endswith(f"error: {message}\n")
