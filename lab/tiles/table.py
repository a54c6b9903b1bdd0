"""Table of tiles from measurements: replaces `token2wav/kernels/tiles.json`.

    .venv/bin/python -m lab.tiles.table out/tiles    # folder of `lab.tiles.measure`

It prints the tile of each measured product before and after.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.report import merge, rehearsed, rows_of
from lab.tiles.measure import RATES, SECTION
from token2wav.kernels.tiles import TABLE, Limits, ProductSize, Rates, Tile, TileTable

# Part of a measured time that counts at least as the time of the product. The rest is the launch.
_LEAST_PART = 0.1


def measured(table: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table with measured rates and ratios.

    Args:
        table: contents of `tiles.json`.

    Raises:
        ValueError: the results are from a rehearsal, or have no rates.
    """
    if rehearsed(content):
        raise ValueError("these results are of a rehearsal, whose times mean nothing")
    rows = rows_of(content, SECTION)
    if RATES not in rows:
        raise ValueError("these results have no rates of `lab.tiles.measure`")
    facts, values = content["facts"], rows.pop(RATES)
    source = f"measured on {facts['gpu']}, {facts['date']}"
    rates = {name: float(f"{values[name]:.3g}") for name in table["rates"]}
    computed = TileTable(Rates(**rates), {})
    # Ratios that were measured before belong to other rates.
    tiles = {
        product: {
            dtype: [asdict(_tile(row)) | {"ratios": {}} for row in variants]
            for dtype, variants in by_dtype.items()
        }
        for product, by_dtype in table["tiles"].items()
    }
    for row in rows.values():
        size = size_of(row)
        for timed in row["tiles"]:
            us = max(timed["us"] - values["empty_node_us"], _LEAST_PART * timed["us"])
            expected_us = computed.expected_us(_tile(timed), size, row["multiprocessors"])
            for known in tiles[row["product"]][row["dtype"]]:
                if _tile(known) == _tile(timed):
                    known["ratios"][str(size.rows * size.copies)] = float(f"{us / expected_us:.3g}")
    sources = {name: {"value": rate, "source": source} for name, rate in rates.items()}
    return {"rates": sources, "tiles": tiles}


def _tile(row: Mapping[str, Any]) -> Tile:
    """Returns the tile of a row, without ratios."""
    return Tile(*(row[name] for name in ("rows", "outputs", "inputs", "warps", "stages")))


def size_of(row: Mapping[str, Any]) -> ProductSize:
    """Returns the size of the product that a row of the results measured."""
    dtype = getattr(torch, row["dtype"])
    return ProductSize(row["rows"], row["outputs"], row["inputs"], dtype, row["copies"])


def choices(table: TileTable, content: Mapping[str, Any]) -> Iterator[tuple[str, Tile]]:
    """Yields the tile of each measured product."""
    for key, row in rows_of(content, SECTION).items():
        if key != RATES:
            limits = Limits(row["multiprocessors"])
            yield key, table.best(row["product"], size_of(row), limits)


def text(table: Mapping[str, Any]) -> str:
    """Formats a table as JSON with a line for each tile."""

    def block(name: str, lines: list[str], ends: str, indent: int) -> str:
        inner = ",\n".join(lines)
        return f'{" " * indent}"{name}": {ends[0]}\n{inner}\n{" " * indent}{ends[1]}'

    rates = [f'  "{name}": {json.dumps(rate)}' for name, rate in table["rates"].items()]
    products = [
        block(
            product,
            [
                block(dtype, [f"    {json.dumps(tile)}" for tile in tiles], "[]", 3)
                for dtype, tiles in by_dtype.items()
            ],
            "{}",
            2,
        )
        for product, by_dtype in table["tiles"].items()
    ]
    parts = block("rates", rates, "{}", 1), block("tiles", products, "{}", 1)
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders of `lab.tiles.measure`")
    options = parser.parse_args()
    before = json.loads(TABLE.read_text())
    try:
        content = merge(options.folders)
        after = measured(before, content)
    except ValueError as error:
        parser.error(str(error))
    TABLE.write_text(text(after))
    old, new = (dict(choices(TileTable.read(table), content)) for table in (before, after))
    for key, tile in new.items():
        changed = "" if replace(tile, ratios=()) == replace(old[key], ratios=()) else " (new)"
        print(f"{key}: {tile.rows} x {tile.outputs} x {tile.inputs}, {tile.warps} warps{changed}")


if __name__ == "__main__":
    main()
