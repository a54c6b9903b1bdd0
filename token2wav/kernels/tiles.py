"""Tiles of matrix products, and the choice of the tile that is expected to take the least time.

A program (an instance of a kernel) computes one tile of the results. For each tile it reads rows of
x and rows of the weights from the L2 cache. Wide tiles read less in all; narrow tiles spread the
reads over more multiprocessors. `tiles.json` holds the tiles of each product and the rates of the
GPU as data. `python -m lab.tiles.table` replaces the data by measurements of a GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

# Queries, keys and values; GELU with tanh; GELU with the error function, which needs more
# registers; causal convolutions; convolutions of the vocoder.
Product = Literal["heads", "gelu", "gelu_exact", "convolution", "vocoder"]

MULTIPROCESSORS = 132  # of one H100 or H200
SHARED_BYTES = 227 << 10  # shared memory of a program on compute capability 9.0
TABLE = Path(__file__).with_name("tiles.json")
_NARROWEST = 16  # rows and columns of the smallest matrix of the tensor cores


@dataclass(frozen=True)
class Tile:
    """Tile of a product.

    Attributes:
        inputs: elements of the sums that a program multiplies in one iteration of its loop.
        stages: iterations whose elements are in shared memory at once.
        ratios: measured time divided by the computed time, by the number of rows that was measured;
            empty before a measurement.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    ratios: tuple[tuple[int, float], ...] = ()

    def shared_bytes(self, itemsize: int) -> int:
        """Returns the shared memory that the loop needs."""
        return self.stages * (self.rows + self.outputs) * self.inputs * itemsize

    def ratio(self, rows: int) -> float:
        """Returns the ratio that was measured with the most similar number of rows."""
        ratios = ((abs(math.log(rows / count)), ratio) for count, ratio in self.ratios)
        return min(ratios, default=(0.0, 1.0))[1]


class ProductSize(NamedTuple):
    """Size of a product, or of several of the same size in one launch."""

    rows: int
    outputs: int
    inputs: int  # elements of each sum: columns of x, times the taps of a convolution
    dtype: torch.dtype
    copies: int = 1  # products in the launch


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU that limit a product. `tiles.json` names the source of each rate."""

    l2_bytes_per_us: float  # bytes that all multiprocessors read from the L2 cache in a microsecond
    sm_bytes_per_us: float  # bytes that one multiprocessor reads from the L2 cache in a microsecond
    latency_us: float  # time from a read to the end of the iteration that uses it


@dataclass(frozen=True)
class TileTable:
    """Contents of `tiles.json`: rates, and the tiles of each product by the name of its dtype."""

    rates: Rates
    tiles: Mapping[str, Mapping[str, tuple[Tile, ...]]]

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> TileTable:
        """Reads the parsed file."""
        rates = Rates(**{name: rate["value"] for name, rate in content["rates"].items()})
        tiles = {
            product: {dtype: tuple(map(_tile, rows)) for dtype, rows in by_dtype.items()}
            for product, by_dtype in content["tiles"].items()
        }
        return cls(rates, tiles)

    def variants(self, product: Product, dtype: torch.dtype) -> tuple[Tile, ...]:
        """Returns all tiles of a product."""
        return self.tiles[product][str(dtype).removeprefix("torch.")]

    def expected_us(
        self, tile: Tile, size: ProductSize, multiprocessors: int = MULTIPROCESSORS
    ) -> float:
        """Returns the expected time of a product in microseconds, without the launch itself.

        The time is the longest of three: all bytes through the L2 cache, the bytes of the busiest
        multiprocessor, and the latency of the loop.
        """
        row_tiles, output_tiles = -(-size.rows // tile.rows), -(-size.outputs // tile.outputs)
        read = size.copies * (size.rows * output_tiles + size.outputs * row_tiles)
        busiest = -(-size.copies * row_tiles * output_tiles // multiprocessors)
        row_bytes = size.inputs * size.dtype.itemsize
        iterations = -(-size.inputs // tile.inputs)
        computed = max(
            read * row_bytes / self.rates.l2_bytes_per_us,
            busiest * (tile.rows + tile.outputs) * row_bytes / self.rates.sm_bytes_per_us,
            iterations * self.rates.latency_us / (tile.stages - 1),
        )
        return computed * tile.ratio(size.copies * size.rows)

    def best(self, product: Product, size: ProductSize, limits: Limits) -> Tile:
        """Returns the tile with the least expected time that fits the GPU."""
        tiles = (fitted(tile, size.outputs) for tile in self.variants(product, size.dtype))
        return min(
            (t for t in tiles if t.shared_bytes(size.dtype.itemsize) <= limits.shared_bytes),
            key=lambda tile: self.expected_us(tile, size, limits.multiprocessors),
        )


class Limits(NamedTuple):
    """Limits of a GPU."""

    multiprocessors: int = MULTIPROCESSORS
    shared_bytes: int = SHARED_BYTES  # largest shared memory of a program


def _tile(row: Mapping[str, Any]) -> Tile:
    ratios = {int(rows): ratio for rows, ratio in row.get("ratios", {}).items()}
    sizes = {name: value for name, value in row.items() if name != "ratios"}
    return Tile(**sizes, ratios=tuple(ratios.items()))


def fitted(tile: Tile, outputs: int) -> Tile:
    """Returns the tile, made narrower if it has more columns than the results."""
    width = 1 << (outputs - 1).bit_length()  # a power of 2, as the sizes of all tiles
    return replace(tile, outputs=min(tile.outputs, max(_NARROWEST, width)))


@lru_cache
def table() -> TileTable:
    return TileTable.read(json.loads(TABLE.read_text()))


@lru_cache
def limits(device: torch.device) -> Limits:
    """Returns the limits of a GPU; on another device, the limits of one H200."""
    if device.type != "cuda":
        return Limits()
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)
    return Limits(properties["multiprocessor_count"], properties["max_shared_mem"])


@lru_cache(maxsize=4096)
def choose(product: Product, size: ProductSize, device: torch.device) -> Tile:
    """Returns the tile of a product on a device."""
    return table().best(product, size, limits(device))


ENOUGH_PROGRAMS = 128  # about the number of multiprocessors of a large GPU


def fills_gpu(grid: tuple[int, ...]) -> bool:
    """Returns whether a grid has a program for every multiprocessor of a large GPU.

    Kernels that are no plain products choose their tiles by this rule.
    """
    return math.prod(grid) >= ENOUGH_PROGRAMS
