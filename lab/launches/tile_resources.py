"""Registers, spilled bytes and shared memory of every tile, compiled without a GPU.

    TRITON_INTERPRET=0 .venv/bin/python -m lab.launches.tile_resources --save    # three minutes

`benchmarks/results/tile_resources.json` keeps the rows of each version of the Triton language.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

import torch
import triton
from triton.runtime import driver

from benchmarks.environment import RESULTS, describe, program_parser, save
from lab.launches.table import markdown
from lab.tiles.products import FULL, LAUNCHES, SMALL, UNET, Sizes, heads, with_tile
from testkit.compile_only import AbsentGPU, compiling
from token2wav.kernels.tiles import Product, Tile, table

NAME = "tile_resources"
CAPABILITIES = (80, 90, 100)
_ROWS = 200  # no binary depends on the number of rows
# Sizes for which each product is compiled. A row has the most resources of all sizes.
_SIZES: dict[tuple[str, str], tuple[Sizes, ...]] = {
    ("gelu", "float16"): (FULL, SMALL),
    ("gelu_exact", "float16"): (UNET,),
    ("convolution", "float32"): (SMALL, UNET),
}
_USED = re.compile(r"(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)


def rows() -> Iterator[dict[str, Any]]:
    """Compiles all tiles of all products, and yields a row for each and each capability."""
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    for capability in CAPABILITIES:
        driver.set_active(AbsentGPU(capability))
        for product, by_dtype in table().tiles.items():
            for dtype, tiles in by_dtype.items():
                for tile in tiles:
                    sizes = {name: size for name, size in asdict(tile).items() if name != "ratios"}
                    resources = _resources(product, dtype, tile)  # type: ignore[arg-type]
                    yield {"capability": capability, "product": product, "dtype": dtype} | (
                        sizes | resources
                    )


def _resources(product: Product, name: str, tile: Tile) -> dict[str, int]:
    """Compiles a tile, and returns the most registers, spilled bytes and shared memory."""
    dtype: torch.dtype = getattr(torch, name)
    with torch.device("meta"):
        launches = [
            LAUNCHES[product](sizes, _ROWS, dtype) for sizes in _SIZES.get((product, name), (FULL,))
        ]
        if product == "heads" and dtype == torch.float16:  # storing in int8 needs registers
            launches += [heads(SMALL, _ROWS, dtype, "int8"), heads(FULL, _ROWS, dtype, "int8")]
    binaries: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as log, with_tile(tile), compiling(binaries):
        for launch in launches:
            launch()
    usages = [tuple(map(int, pair)) for pair in _USED.findall(log.getvalue())]
    assert len(usages) >= len(binaries) > 0
    return {
        "registers": max(registers for _, registers in usages),
        "spilled_bytes": max(spilled for spilled, _ in usages),
        "shared_bytes": max(binary.metadata.shared for binary in binaries.values()),
    }


def main() -> None:
    parser = program_parser()
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{NAME}.json")
    options = parser.parse_args()
    compiled = list(rows())
    print(markdown([{name: str(value) for name, value in row.items()} for row in compiled]))
    if options.save:
        path = RESULTS / f"{NAME}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        columns = [name for name in compiled[0] if name not in ("product", "dtype")]
        tiles: dict[str, list[list[int]]] = {}
        for row in compiled:
            numbers = [row[name] for name in columns]
            tiles.setdefault(f"{row['product']}, {row['dtype']}", []).append(numbers)
        result = {"environment": describe("triton"), "columns": columns, "tiles": tiles}
        save(NAME, known | {triton.__version__: result})


if __name__ == "__main__":
    main()
