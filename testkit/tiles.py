"""Tiles of products for tests that compare every tile with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from token2wav.kernels import tiles
from token2wav.kernels.tiles import Product, Tile


def tiles_of(product: Product) -> list[Any]:
    """Returns a parameter set (dtype, tile) for each tile of a product.

    Interpreted kernels are slow. So without a GPU only the smallest and the largest tile belong to
    `make test`, and the others to the tests before a release.
    """
    cases = []
    for dtype, variants in tiles.table().tiles[product].items():
        by_size = sorted(variants, key=lambda tile: tile.rows * tile.outputs * tile.inputs)
        for tile in variants:
            extreme = tile in (by_size[0], by_size[-1]) or torch.cuda.is_available()
            name = f"{dtype}-{tile.rows}x{tile.outputs}x{tile.inputs}"
            marks = () if extreme else (pytest.mark.slow,)
            cases.append(pytest.param(getattr(torch, dtype), tile, id=name, marks=marks))
    return cases


def use_tile(monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    """Makes all products use a tile."""
    monkeypatch.setattr(
        tiles, "choose", lambda product, size, device: tiles.fitted(tile, size.outputs)
    )
