"""Products of the published models, launched with any of their tiles.

The module imports the Triton language.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache, Storage
from token2wav.execution.block_table import HEADER, Block
from token2wav.kernels import products, tiles
from token2wav.kernels.causal_convolution import CausalConvolution
from token2wav.kernels.convolution import Convolution
from token2wav.kernels.norms import NormVectors
from token2wav.kernels.products import gelu_product, project_heads
from token2wav.kernels.signals import FAR, PieceTensors, Signal, SignalLayout
from token2wav.kernels.tiles import Product, ProductSize, Tile
from token2wav.networks.unet import CausalConv

Launch = Callable[[], object]
_BRANCHES = 2  # of the guidance
_TAPS, _SIGNAL_TAPS = 3, 7
_PIECE_ROWS = 200  # most rows of a stream in a batch of the vocoder


@dataclass(frozen=True)
class Sizes:
    """Sizes of the products of a model.

    Attributes:
        block_frames: rows of a block.
        dim: channels of the estimator.
        hidden: outputs of the product with GELU.
        dim_head: channels of a head.
        signal: channels of a signal of the vocoder.
        norms: whether heads have norms.
    """

    block_frames: int
    dim: int
    hidden: int
    dim_head: int
    signal: int
    norms: bool = False


FULL = Sizes(50, 1024, 2048, 64, 256)  # CosyVoice3
SMALL = Sizes(50, 512, 2048, 64, 256, norms=True)  # Step-Audio2
UNET = Sizes(50, 256, 1024, 64, 256)  # CosyVoice2
TINY = Sizes(4, 32, 48, 16, 16)  # for interpreted kernels
# The products that `measure.py` times: name, dtype and sizes. Only Step-Audio2 and the U-Nets have
# causal convolutions.
TIMED: list[tuple[Product, torch.dtype, Sizes]] = [
    ("heads", torch.float16, FULL),
    ("gelu", torch.float16, FULL),
    ("convolution", torch.float32, SMALL),
    ("vocoder", torch.float32, FULL),
    ("gelu_exact", torch.float16, UNET),
]


def heads(sizes: Sizes, rows: int, dtype: torch.dtype, storage: Storage | None = None) -> Launch:
    """Returns the launch of the product for queries, keys and values."""
    table = _table(sizes, rows)
    blocks, width = len(table), sizes.dim // sizes.dim_head
    stored: Storage = storage or ("float16" if dtype == torch.float16 else "float32")
    layout = CacheLayout(1, 1, width, sizes.dim_head, sizes.block_frames, stored)
    view = PagedKVCache(layout, blocks, table.device).layer(0, 0)
    x = _random(_BRANCHES * blocks, sizes.block_frames, sizes.dim, dtype=dtype)
    projections = (
        _random(3 * sizes.dim, sizes.dim, dtype=dtype),
        _random(3 * sizes.dim, dtype=dtype),
    )
    angles = _random(blocks, sizes.block_frames, sizes.dim_head, dtype=torch.float32)
    norm = NormVectors.of(torch.nn.LayerNorm(sizes.dim_head))
    norms = (norm, norm) if sizes.norms else None
    return lambda: project_heads(x, projections, view, angles, angles, table, norms)


def gelu(sizes: Sizes, rows: int, dtype: torch.dtype, *, tanh: bool = True) -> Launch:
    """Returns the launch of the product with GELU."""
    x = _random(rows, sizes.dim, dtype=dtype)
    layer = torch.nn.Linear(sizes.dim, sizes.hidden, dtype=dtype).requires_grad_(False)
    return lambda: gelu_product(x, layer, tanh=tanh)


def convolution(sizes: Sizes, rows: int, dtype: torch.dtype) -> Launch:
    """Returns the launch of a causal convolution."""
    table = _table(sizes, rows)
    state = torch.zeros(len(table), _BRANCHES, _TAPS - 1, sizes.dim, dtype=dtype)
    past: Any = SimpleNamespace(table=table, states=[state.transpose(-1, -2)])
    x = _random(_BRANCHES * len(table), sizes.block_frames, sizes.dim, dtype=dtype)
    kernel = CausalConvolution(CausalConv(sizes.dim, sizes.dim).requires_grad_(False), "tf32")
    return lambda: kernel.convolve(x, past)


def vocoder(sizes: Sizes, rows: int, dtype: torch.dtype) -> Launch:
    """Returns the launch of a convolution of the vocoder, with a residual and Snake."""
    channels, streams = sizes.signal, -(-rows // _PIECE_ROWS)
    halo = SignalLayout(channels, 1, (0,), halo=_SIGNAL_TAPS - 1, dtype=dtype)
    states = {dtype: torch.zeros(streams, halo.width, dtype=dtype)}
    pieces = torch.tensor([[0, rows // streams, FAR, 0]], dtype=torch.int32).repeat(streams, 1)
    batch = PieceTensors(rows // streams, pieces, states, states)
    x, plain = Signal.empty(halo, batch), SignalLayout(channels, 1, (0,), dtype=dtype)
    residual = Signal.empty(plain, batch)
    for signal in (x, residual):
        signal.data.normal_()
    kernel = Convolution(
        _random(1, channels, _SIGNAL_TAPS * channels, dtype=dtype),
        _random(1, channels, dtype=dtype),
        torch.tensor([[1, 0, 0, 0, 0]], dtype=torch.int32),
        _SIGNAL_TAPS * channels,
        step=channels,
        rate=1,
        raw=plain,
        out=halo,
        activation="snake",
        slopes=_random(1, 3, channels, dtype=dtype),
        precision="ieee" if dtype == torch.float64 else "tf32",
    )
    return lambda: kernel(batch, x, residual)


LAUNCHES: dict[Product, Callable[[Sizes, int, torch.dtype], Launch]] = {
    "heads": heads,
    "gelu": gelu,
    "gelu_exact": partial(gelu, tanh=False),
    "convolution": convolution,
    "vocoder": vocoder,
}


@contextmanager
def with_tile(tile: Tile) -> Iterator[list[ProductSize]]:
    """Makes all products use a tile, however many rows they have, and yields the list of their
    sizes.
    """
    launched: list[ProductSize] = []

    def choose(product: Product, size: ProductSize, device: torch.device) -> Tile:
        launched.append(size)
        return tiles.fitted(tile, size.outputs)

    by_kernels = patch.multiple(products, cublas_rows={}, _EXACT_GELU_ROWS=sys.maxsize)
    with patch.object(tiles, "choose", choose), by_kernels:
        yield launched


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns random numbers, because a GPU computes zeros with less power and higher clocks."""
    return torch.randn(shape).to(dtype) / shape[-1] ** 0.5


def _table(sizes: Sizes, rows: int) -> torch.Tensor:
    """Returns the block table of a batch in which every block is a chunk."""
    frames, blocks = sizes.block_frames, rows // (_BRANCHES * sizes.block_frames)
    rows_of_table = [
        [*Block(frames, frames, 0, block, last=True, pages=[block]).row] for block in range(blocks)
    ]
    table = torch.tensor(rows_of_table, dtype=torch.int32)
    assert table.shape == (blocks, HEADER + 1)
    return table
