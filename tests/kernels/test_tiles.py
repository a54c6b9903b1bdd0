"""Tiles of products: the choice of a tile, and the registers and shared memory of a GPU."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from benchmarks.environment import RESULTS
from token2wav.kernels.tiles import (
    TABLE,
    Limits,
    Product,
    ProductSize,
    Rates,
    Tile,
    TileTable,
    fitted,
    table,
)

HALF, SINGLE = torch.float16, torch.float32
# Products of CosyVoice3 and of Step-Audio2, for one block, for the first chunk of one stream, and
# for 32 and 64 streams.
CHOSEN: list[tuple[Product, ProductSize, tuple[int, int, int]]] = [
    ("heads", ProductSize(100, 3072, 1024, HALF), (64, 64, 64)),
    ("heads", ProductSize(200, 3072, 1024, HALF), (64, 64, 64)),
    ("heads", ProductSize(12800, 3072, 1024, HALF), (64, 128, 64)),
    ("gelu", ProductSize(100, 2048, 1024, HALF), (64, 32, 128)),
    ("gelu", ProductSize(200, 2048, 1024, HALF), (64, 64, 64)),
    ("gelu", ProductSize(12800, 2048, 1024, HALF), (128, 128, 64)),
    ("convolution", ProductSize(200, 512, 1536, SINGLE), (32, 32, 64)),
    ("convolution", ProductSize(12800, 512, 1536, SINGLE), (128, 128, 32)),
    ("vocoder", ProductSize(440, 256, 1792, SINGLE), (32, 32, 128)),
    ("vocoder", ProductSize(440, 256, 2816, SINGLE, 3 * 64), (64, 64, 64)),
    ("vocoder", ProductSize(6600, 18, 448, SINGLE), (64, 32, 64)),
]
NARROW, WIDE = Tile(16, 64, 64, 4, 3), Tile(128, 128, 64, 8, 3)
RATES = Rates(l2_bytes_per_us=1e6, sm_bytes_per_us=1e5, latency_us=0.5)


@pytest.mark.parametrize(("product", "size", "tile"), CHOSEN)
def test_choices_of_the_committed_table(
    product: Product, size: ProductSize, tile: tuple[int, int, int]
) -> None:
    chosen = table().best(product, size, Limits())
    assert (chosen.rows, chosen.outputs, chosen.inputs) == tile


@pytest.mark.parametrize(
    ("tile", "size", "us"),
    [
        # 13 x 8 tiles: x is read 8 times, the weights 13 times
        (NARROW, ProductSize(200, 512, 1024, HALF), (200 * 8 + 512 * 13) * 2048 / 1e6),
        # 8 programs on 132 multiprocessors, each reads 256 rows of 2048 bytes
        (WIDE, ProductSize(200, 512, 1024, HALF), 256 * 2048 / 1e5),
        # a single program of 512 iterations, of which two wait at once
        (NARROW, ProductSize(1, 1, 32768, HALF), 512 * 0.5 / 2),
        # three products have three times the bytes
        (NARROW, ProductSize(200, 512, 1024, HALF, 3), 3 * (200 * 8 + 512 * 13) * 2048 / 1e6),
    ],
)
def test_expected_time_is_the_longest_of_three(tile: Tile, size: ProductSize, us: float) -> None:
    assert TileTable(RATES, {}).expected_us(tile, size) == pytest.approx(us)


def test_a_smaller_gpu_has_more_tiles_for_each_multiprocessor() -> None:
    size = ProductSize(200, 512, 1024, HALF)
    assert TileTable(RATES, {}).expected_us(WIDE, size, 4) == pytest.approx(2 * 256 * 2048 / 1e5)


def test_measured_times_replace_computed_ones() -> None:
    """The measurement with the most similar number of rows counts."""
    slow = replace(WIDE, ratios=((200, 9.0), (6400, 1.0)))
    measured = TileTable(table().rates, {"gelu": {"float16": (NARROW, slow)}})
    few, many = (ProductSize(rows, 2048, 1024, HALF) for rows in (300, 5000))
    assert measured.best("gelu", few, Limits()) == NARROW
    assert measured.best("gelu", many, Limits()) == slow


def test_a_tile_fits_the_shared_memory_of_the_gpu() -> None:
    size = ProductSize(12800, 2048, 1024, HALF)
    small = table().best("gelu", size, Limits(shared_bytes=80 << 10))
    assert small.shared_bytes(2) <= 80 << 10
    assert table().best("gelu", size, Limits()).shared_bytes(2) == 96 << 10


@pytest.mark.parametrize(("outputs", "width"), [(1, 16), (18, 32), (64, 64), (300, 64)])
def test_a_tile_is_no_wider_than_the_results(outputs: int, width: int) -> None:
    assert fitted(Tile(64, 64, 32, 4, 3), outputs).outputs == width


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
