"""Measured tiles replace the table of tiles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.settings import RESULTS
from lab.tiles.table import choices, measured, text
from token2wav.kernels.tiles import TABLE, Product, Tile, TileTable

COMMITTED = json.loads(TABLE.read_text())
FACTS = {"gpu": "a GPU", "date": "2026-01-02", "size": "full", "precision": "float16"}


def results(rows: dict[str, dict[str, Any]], **facts: Any) -> dict[str, Any]:
    common = {"section": "tiles", "problem": None, "left_out": None}
    return {"facts": FACTS | facts, "rows": [common | {"key": key} | rows[key] for key in rows]}


RATES = {
    "empty_node_us": 2.0,
    "l2_bytes_per_us": 5.4321e6,
    "sm_bytes_per_us": 1e5,
    "latency_us": 0.5,
}
SIZE = {"rows": 200, "outputs": 2048, "inputs": 1024, "dtype": "float16", "copies": 1}
GELU = SIZE | {"product": "gelu", "multiprocessors": 132}


def timed(table: dict[str, Any], times_us: dict[int, float]) -> list[dict[str, Any]]:
    """Returns rows of tiles of the product with GELU: 9 us each, except for `times_us`."""
    variants = table["tiles"]["gelu"]["float16"]
    return [tile | {"us": times_us.get(at, 9.0)} for at, tile in enumerate(variants)]


def test_measured_times_and_rates_replace_the_table() -> None:
    row = GELU | {"tiles": timed(COMMITTED, {0: 3.0})}
    table = measured(COMMITTED, results({"rates": RATES, "gelu, 200 rows": row}))
    assert table["rates"]["l2_bytes_per_us"] == {
        "value": 5.43e6,
        "source": "measured on a GPU, 2026-01-02",
    }
    first = table["tiles"]["gelu"]["float16"][0]
    # 1 us without the launch
    row_tiles, output_tiles = -(-200 // first["rows"]), -(-2048 // first["outputs"])
    computed_us = (200 * output_tiles + 2048 * row_tiles) * 2048 / 5.43e6
    assert first["ratios"] == {"200": pytest.approx(1 / computed_us, rel=0.01)}
    read = TileTable.read(json.loads(text(table)))
    [(key, tile)] = choices(read, results({"rates": RATES, "gelu, 200 rows": row}))
    assert key == "gelu, 200 rows"
    assert (tile.rows, tile.outputs) == (first["rows"], first["outputs"])
    again = measured(table, results({"rates": RATES}))
    assert not again["tiles"]["gelu"]["float16"][0]["ratios"], "of other rates"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (results({"rates": RATES}, gpu=None), "rehearsal, whose times mean nothing"),
        (results({}), "no rates of `lab.tiles.measure`"),
    ],
)
def test_results_without_measurements_are_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured(COMMITTED, content)


@pytest.mark.parametrize("product", ["gelu", "gelu_exact"])
def test_no_library_computes_a_product_that_is_timed(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many rows as on a GPU. A rehearsal has few."""
    # Not imported above, because tests of kernels set a variable before they import Triton.
    from lab.tiles.products import LAUNCHES, TINY, with_tile

    monkeypatch.setattr("token2wav.kernels.products._gelu_product", MagicMock())
    launch = LAUNCHES[product](TINY, 6400, torch.float16)
    with with_tile(Tile(64, 16, 32, 4, 2)) as launched:
        launch()
    assert [size.rows for size in launched] == [6400]


def test_the_program_times_every_tile_that_it_can(tmp_path: Path) -> None:
    """On a CPU with interpreted kernels. The result is a table again."""
    command = [sys.executable, "-m", "lab.tiles.measure", "--rehearse", "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    content = json.loads((tmp_path / RESULTS).read_text())
    content["facts"] |= FACTS
    table = measured(COMMITTED, content)
    for product, dtype in [
        ("heads", "float16"),
        ("gelu", "float16"),
        ("gelu_exact", "float16"),
        ("convolution", "float32"),
        ("vocoder", "float32"),
    ]:
        for tile in table["tiles"][product][dtype]:
            assert list(tile["ratios"]) == ["8"]
            assert tile["ratios"]["8"] > 0
    assert TileTable.read(json.loads(text(table)))
