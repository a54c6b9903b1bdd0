"""Measured tiles replace the table of tiles, and tiles of the table do not spill."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.environment import RESULTS
from benchmarks.gpu.settings import LeftOut, Settings
from benchmarks.gpu.tile_table import choices, measured, text
from benchmarks.gpu.tiles import tiles
from token2wav.kernels.tiles import TABLE, TileTable

SIZES = ("rows", "outputs", "inputs", "warps", "stages")
COMMITTED = json.loads(TABLE.read_text())
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of a program, by capability
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
        (results({}), "no rates of section tiles"),
    ],
)
def test_results_without_measurements_are_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured(COMMITTED, content)


def test_the_section_times_every_tile_that_it_can() -> None:
    """On a CPU with interpreted kernels, as in a rehearsal. The result is a table again."""
    settings = Settings(Path(), "cpu").rehearsal()
    content = results({key: measure() for key, measure in tiles(Path(), settings, {})})
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


def test_the_section_ends_in_time() -> None:
    settings = Settings(Path(), "cpu", tiles_s=-1.0).rehearsal()
    for _, measure in tiles(Path(), settings, {}):
        with pytest.raises(LeftOut, match="the section takes at most -1 s"):
            measure()


def test_tiles_of_the_table_fit_registers_and_shared_memory() -> None:
    compilers = json.loads((RESULTS / "tile_resources.json").read_text())
    assert "3.6.0" in compilers, "the Triton language of the GPU machine of docs/gpu.md"
    for version, compiler in compilers.items():
        shared, spilled = map(compiler["columns"].index, ("shared_bytes", "spilled_bytes"))
        for product, by_dtype in COMMITTED["tiles"].items():
            for dtype, variants in by_dtype.items():
                rows = compiler["tiles"].get(f"{product}, {dtype}", [])
                for tile, capability in itertools.product(variants, SHARED_BYTES):
                    sizes = [capability, *(tile[name] for name in SIZES)]
                    [used] = [row for row in rows if row[: len(sizes)] == sizes] or [None]
                    assert used, f"run lab.launches.tile_resources --save with Triton {version}"
                    assert used[spilled] == 0, (version, product, sizes)
                    assert used[shared] <= SHARED_BYTES[capability], (version, product, sizes)
