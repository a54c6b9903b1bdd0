"""Pictures of the pages: they show the committed results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.environment import RESULTS, saved_runs
from benchmarks.load.subject import LABELS
from lab.pictures import (
    IMAGES,
    SHOWN,
    draw_first_audio,
    draw_gaps,
    draw_next_packet,
    load_rows,
    main,
)

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def test_lines_of_load_and_gaps_are_the_results() -> None:
    rows = load_rows()
    first_audio, gaps = draw_first_audio(rows).axes[0], draw_gaps(rows).axes[0]
    for axis, values in (
        (first_audio, lambda row: row["first_playable_ms"]["p50"]),
        (gaps, lambda row: 100 * row["buffer_200"]),
    ):
        lines = {line.get_label(): line for line in axis.get_lines()}
        for name in SHOWN:
            points = {row["utterances_per_s"]: values(row) for row in rows if row["model"] == name}
            line = lines[LABELS[name]]
            assert dict(np.asarray(line.get_xydata()).tolist()) == points


def test_every_match_with_public_code_has_a_pair_of_bars() -> None:
    runs = saved_runs("codec_peers")
    axis = draw_next_packet(runs).axes[0]
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert sorted(names) == sorted(f"{run['family']} ({run['peer']})" for run in runs)
    public, ours = ([bar.get_width() for bar in bars] for bars in axis.containers)
    ratios = [theirs / mine for theirs, mine in zip(public, ours, strict=True)]
    assert ratios == sorted(ratios)


def test_one_command_writes_the_pictures_of_the_pages(tmp_path: Path) -> None:
    main(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 4
    pages = (IMAGES.parent / "exactness.md", RESULTS / "README.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for name in names:
        assert f"images/{name})" in text
        assert (IMAGES / name).is_file()
