"""Tiles of the table fit the registers and the shared memory of a GPU."""

from __future__ import annotations

import itertools
import json

from benchmarks.environment import RESULTS
from token2wav.kernels.tiles import TABLE

SIZES = ("rows", "outputs", "inputs", "warps", "stages")
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of a program, by capability


def test_tiles_of_the_table_fit_registers_and_shared_memory() -> None:
    tiles = json.loads(TABLE.read_text())["tiles"]
    compilers = json.loads((RESULTS / "tile_resources.json").read_text())
    assert "3.6.0" in compilers, "the Triton language of the GPU machine of docs/gpu.md"
    for version, compiler in compilers.items():
        shared, spilled = map(compiler["columns"].index, ("shared_bytes", "spilled_bytes"))
        for product, by_dtype in tiles.items():
            for dtype, variants in by_dtype.items():
                rows = compiler["tiles"].get(f"{product}, {dtype}", [])
                for tile, capability in itertools.product(variants, SHARED_BYTES):
                    sizes = [capability, *(tile[name] for name in SIZES)]
                    [used] = [row for row in rows if row[: len(sizes)] == sizes] or [None]
                    assert used, f"run lab.launches.tile_resources --save with Triton {version}"
                    assert used[spilled] == 0, (version, product, sizes)
                    assert used[shared] <= SHARED_BYTES[capability], (version, product, sizes)
