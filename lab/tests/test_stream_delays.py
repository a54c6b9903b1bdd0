"""The computed delays of chunks, and their picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from lab.png import save_picture
from lab.stream_delays import draw, measured, p99_delay_ms

mpl.use("Agg")


def row(name: str, **values: Any) -> dict[str, Any]:
    key = " ".join(map(str, (name, *values.items())))
    common = {"section": "baselines", "problem": None, "left_out": None, "took_s": 0.1}
    return {**common, "key": key, "system": name, **values}


def content() -> dict[str, Any]:
    """The loop has one request at a time; the other system computes batches of up to 64."""
    rows = [row("loop", mel_error=2e-4), row("ours", mel_error=1e-4)]
    rows += [row("loop", streams=1, spoken_s=2.0, total_ms=[100.0, 99.0, 101.0])]
    for spoken_s in (2.0, 10.0):
        for streams, ms in ((1, 10.0), (64, 128.0)):
            rows.append(row("ours", streams=streams, spoken_s=spoken_s, total_ms=[ms, ms, ms]))
    return {"facts": {"gpu": "NVIDIA H200", "size": "full"}, "rows": rows}


@pytest.mark.parametrize(
    ("batch_ms", "streams", "delay_ms"),
    [
        ({1: 100.0}, 1, 100.0),
        ({1: 100.0}, 10, 100.0),  # one chunk is done when the next one is due
        ({1: 20.0, 4: 50.0}, 2, 20.0),
    ],
)
def test_a_server_that_keeps_up_delays_a_chunk_by_its_own_time(
    batch_ms: dict[int, float], streams: int, delay_ms: float
) -> None:
    assert p99_delay_ms(batch_ms, streams) == pytest.approx(delay_ms)


def test_delays_grow_without_end_beyond_the_capacity() -> None:
    """20 streams need 2 s of work each second: the last chunk after a minute is a minute late."""
    assert p99_delay_ms({1: 100.0}, 20) == pytest.approx(0.99 * 60_000, rel=0.02)
    assert p99_delay_ms({1: 10.0, 64: 128.0}, 512) > 1000 > p99_delay_ms({1: 10.0, 64: 128.0}, 256)


def test_systems_are_compared_after_a_history_that_all_have() -> None:
    systems = measured(content())
    assert systems == {"loop": ({1: 100.0}, 2e-4), "ours": ({1: 10.0, 64: 128.0}, 1e-4)}


def test_the_picture_names_card_and_errors(tmp_path: Path) -> None:
    figure = draw(json.loads(json.dumps(content())), streams=(1, 64))
    [axis] = figure.axes
    labels = [line.get_label() for line in axis.get_lines()]
    assert labels == ["loop (error of the mel 2e-04)", "ours (error of the mel 1e-04)", "real time"]
    assert axis.get_title() == "CosyVoice3, random weights, NVIDIA H200"
    loop, ours, real_time = (np.asarray(line.get_ydata(), float) for line in axis.get_lines())
    assert loop[1] > real_time[0] > ours[1]
    save_picture(figure, tmp_path / "streams.png", dpi=50)
    assert (tmp_path / "streams.png").stat().st_size > 1000
