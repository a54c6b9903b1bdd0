"""Times of all tiles of the products on a GPU, and the rates from which tiles are chosen.

python3 -m lab.tiles.measure --out out/tiles    # a minute; needs torch, and no installation
python3 -m lab.tiles.table out/tiles            # turns the results into the table of tiles
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.environment import ROOT, describe, program_parser
from benchmarks.gpu.settings import RESULTS, Row, Rows, Settings
from benchmarks.gpu.worker import Results

RATES, SECTION = "rates", "tiles"
_ROWS = (100, 200, 800, 6400)  # of the products
# Copies of the data of a product. The launches use them in turn, so that no launch finds its data
# in the L2 cache. In a model too, every layer reads other weights than the layer before.
_COPIES = 10
_GRAPH_US = 2000.0  # approximate duration of a graph of launches
_REPLAYS = 5
# The buffer fits into the L2 cache, but not into the caches of the multiprocessors.
_BUFFER, _WIDTH, _SM_WIDTH = 4 << 20, 4096, 16384
_PROGRAMS_PER_SM = 8


def tiles(settings: Settings) -> Rows:
    """Measures rates of the GPU, then every tile of each product."""
    products = import_module("lab.tiles.products")  # imports the Triton language

    def on_device(measure: Callable[[], Row]) -> Row:
        with torch.inference_mode(), torch.device(settings.device):
            return measure()

    yield RATES, partial(on_device, partial(_rates, products, settings))
    for product, dtype, sizes in products.TIMED:
        for rows in _ROWS if settings.size == "full" else (8,):
            measure = partial(_product, products, settings, product, dtype, sizes, rows)
            yield f"{product}, {rows} rows", partial(on_device, measure)


def products(folder: Path, settings: Settings) -> Rows:
    """Section products of the GPU report: the two products of an estimator layer that
    kernels/products.py fuses, with rotation and stores, or with GELU. Each is timed on kernels
    alone, and with cuBLAS for the product itself.

    The launches use the weights of 22 layers in turn, as in CosyVoice3, so that no launch finds its
    weights in the L2 cache.
    """
    timed = import_module("lab.tiles.products")
    kernels = import_module("token2wav.kernels.products")
    ways = {"kernels_us": {}, "cublas_us": {1: 1}}
    tiny = settings.size == "tiny"
    sizes, layers = (timed.TINY, 1) if tiny else (timed.FULL, 22)

    def measure(product: str, rows: int) -> Row:
        row: Row = {"product": product, "rows": rows}
        with torch.inference_mode(), torch.device(settings.device):
            calls = [timed.LAUNCHES[product](sizes, rows, torch.float16) for _ in range(layers)]
            for name, cublas_rows in ways.items():
                with patch.object(kernels, "cublas_rows", cublas_rows):
                    row[name] = round(launch_us(calls, settings, 10.0), 2)
        return row

    for product in ("heads", "gelu"):
        for rows in (8,) if tiny else _ROWS:
            yield f"{product}, {rows} rows", partial(measure, product, rows)


def _rates(products: Any, settings: Settings) -> Row:
    """Measures the time of an empty kernel in a graph, and the rates that limit a product."""
    from lab.tiles import rate_kernels
    from token2wav.kernels.tiles import Tile, limits

    tiny = settings.size == "tiny"
    buffer = torch.rand(2 * _SM_WIDTH if tiny else _BUFFER)
    multiprocessors = 1 if tiny else limits(torch.device(settings.device)).multiprocessors
    many, one = (torch.zeros(count) for count in (_PROGRAMS_PER_SM * multiprocessors, 1))

    def bytes_per_us(out: torch.Tensor, width: int, iterations: int, warps: int) -> float:
        read = partial(
            rate_kernels.read, buffer, out, width=width, iterations=iterations, warps=warps
        )
        return 4.0 * len(out) * iterations * width / launch_us([read], settings, 200.0)

    # A product of one tile with many iterations. Each iteration waits for its reads.
    tile, inputs = Tile(64, 64, 32, 4, 3), 64 if tiny else 32768
    loop = products.gelu(products.Sizes(1, inputs, 64, 16, 16), 64, torch.float16)
    with products.with_tile(tile):
        loop_us = launch_us([loop], settings, 200.0)
    return {
        "empty_node_us": launch_us([partial(rate_kernels.nothing, one)], settings, 2.5),
        "l2_bytes_per_us": bytes_per_us(many, _WIDTH, 1 if tiny else 64, 8),
        "sm_bytes_per_us": bytes_per_us(one, _SM_WIDTH, 1 if tiny else 512, 32),
        "latency_us": loop_us * (tile.stages - 1) / (inputs / tile.inputs),
    }


def _product(
    products: Any, settings: Settings, product: Any, dtype: torch.dtype, sizes: Any, rows: int
) -> Row:
    from token2wav.kernels.tiles import limits, table

    tiny = settings.size == "tiny"
    launches = [
        products.LAUNCHES[product](products.TINY if tiny else sizes, rows, dtype)
        for _ in range(1 if tiny else _COPIES)
    ]
    limit, variants = limits(torch.device(settings.device)), table().variants(product, dtype)
    with products.with_tile(variants[0]) as launched:
        launches[0]()
    [size] = launched
    rows_of_tiles = []
    for tile in variants:
        expected_us = table().expected_us(tile, size, limit.multiprocessors)
        with products.with_tile(tile):
            us = launch_us(launches, settings, expected_us)
        row = {name: value for name, value in asdict(tile).items() if name != "ratios"}
        rows_of_tiles.append(row | {"us": round(us, 2), "expected_us": round(expected_us, 2)})
    shape = size._asdict() | {"product": product, "dtype": str(dtype).removeprefix("torch.")}
    return shape | {"multiprocessors": limit.multiprocessors, "tiles": rows_of_tiles}


def launch_us(
    launches: Sequence[Callable[[], object]], settings: Settings, expected_us: float
) -> float:
    """Returns the time of a launch in microseconds, as a node of a CUDA graph.

    On a CPU it is the time of a call.

    Args:
        launches: launches of the same kernel on different data; the graph has them in turn.
        expected_us: approximate time of a launch, from which the length of the graph follows.
    """
    began = time.perf_counter()
    for launch in launches:  # the first one compiles the kernel
        launch()
    if not settings.on_gpu:
        return 1e6 * (time.perf_counter() - began) / len(launches)
    count = max(len(launches), min(1000, round(_GRAPH_US / expected_us)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            launches[number % len(launches)]()
    graph.replay()
    return min(_replay_us(graph) for _ in range(_REPLAYS)) / count


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000.0 * begin.elapsed_time(end)


def main() -> None:
    parser = program_parser()
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "tiles", help="folder of results"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="small sizes on a CPU: the figures mean nothing"
    )
    options = parser.parse_args()
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before the Triton language is imported
    elif not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --rehearse runs small sizes on a CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(options.out, "cpu").rehearsal() if options.rehearse else Settings()
    gpu = None if options.rehearse else torch.cuda.get_device_name()
    facts = {"gpu": gpu, "size": settings.size, "graphs": True}
    results = Results(options.out / RESULTS, describe("triton") | facts)
    for key, measure in tiles(settings):
        results.add(SECTION, key, measure())


if __name__ == "__main__":
    main()
