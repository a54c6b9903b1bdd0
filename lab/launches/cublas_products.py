"""Expected time of matrix products and convolutions that a library computes (cuBLAS, cuDNN).

The tiles of a library are not known. It is assumed to choose the best of a few common tiles, and to
split long sums among more programs (split-K) if a second launch that adds the parts pays off. Its
programs share reads in clusters, so the L2 cache does not limit large products: their rate is the
one of `RATES`.
"""

from __future__ import annotations

from itertools import product

from lab.launches.launch import CAPTURED_US
from token2wav.kernels.tiles import MULTIPROCESSORS, ProductSize, Tile, table

_TILES = [
    Tile(rows, outputs, inputs=64, warps=4, stages=4)
    for rows, outputs in ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256))
]
_SPLITS = 1, 2, 4, 8, 16
_LEAST_OUTPUTS = 8  # a convolution with fewer outputs in a group is no matrix product
_PARTIAL_BYTES = 4  # of a number of a part, in float32


def library_us(size: ProductSize) -> float:
    """Returns the expected time of a product in microseconds, without its first launch."""
    if size.outputs < _LEAST_OUTPUTS:
        return 0.0
    return min(_us(size, tile, splits) for tile, splits in product(_TILES, _SPLITS))


def _us(size: ProductSize, tile: Tile, splits: int) -> float:
    rates = table().rates
    row_tiles, output_tiles = -(-size.rows // tile.rows), -(-size.outputs // tile.outputs)
    inputs = -(-size.inputs // splits)
    busiest = -(-size.copies * row_tiles * output_tiles * splits // MULTIPROCESSORS)
    read = min(size.rows, tile.rows) + min(size.outputs, tile.outputs)
    computed = max(
        busiest * read * inputs * size.dtype.itemsize / rates.sm_bytes_per_us,
        -(-inputs // tile.inputs) * rates.latency_us / (tile.stages - 1),
    )
    if splits == 1:
        return computed
    parts = splits * size.copies * size.rows * size.outputs * _PARTIAL_BYTES
    return computed + CAPTURED_US + 2 * parts / rates.l2_bytes_per_us  # written, then read
