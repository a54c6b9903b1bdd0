"""Tiles of products for tests that compare every tile with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from token2wav.kernels import tiles
from token2wav.kernels.tiles import Product, Tile


def tiles_of(product: Product) -> list[Any]:
    """Returns a parameter set (dtype, tile) for each tile of a product."""
    return [
        pytest.param(
            getattr(torch, dtype), tile, id=f"{dtype}-{tile.rows}x{tile.outputs}x{tile.inputs}"
        )
        for dtype, variants in tiles.table().tiles[product].items()
        for tile in variants
    ]


def use_tile(monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    """Makes all products use a tile."""
    monkeypatch.setattr(
        tiles, "choose", lambda product, size, device: tiles.fitted(tile, size.outputs)
    )
