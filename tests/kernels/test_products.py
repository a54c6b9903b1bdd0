"""Products with GELU and norms with weights equal torch, on shapes that fill no tile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from testkit.tiles import tiles_of, use_tile
from token2wav.kernels import products
from token2wav.kernels.norms import NormVectors, added_norm
from token2wav.kernels.products import gelu_product
from token2wav.kernels.tiles import Product, Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# on a GPU, the tests belong to the tests that the GPU must pass
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
pytestmark += [pytest.mark.usefixtures("fused_products")]
PRODUCTS: dict[str, Product] = {"tanh": "gelu", "none": "gelu_exact"}
# Sums run in another order, and GELU is computed before the result is rounded to float16.
CLOSE = {torch.float32: 1e-5, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def a_norm(channels: int) -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(channels, device=DEVICE).requires_grad_(False)
    norm.weight.copy_(random(channels))
    norm.bias.copy_(random(channels))
    return norm


@pytest.mark.parametrize(
    ("dtype", "tile", "approximate"),
    [
        pytest.param(*case.values, approximate, id=f"{case.id}-{approximate}", marks=case.marks)
        for approximate, product in PRODUCTS.items()
        for case in tiles_of(product)
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter
def test_product_with_gelu(
    dtype: torch.dtype, tile: Tile, approximate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tile(monkeypatch, tile)
    layer = torch.nn.Linear(72, 150, device=DEVICE, dtype=dtype).requires_grad_(False)
    x = 9 * random(3, 47, 72, dtype=dtype)  # large values, where an exponential overflows
    x[1, 2] = torch.nan  # a row of padding
    output = gelu_product(x, layer, tanh=approximate == "tanh")
    expected = F.gelu(layer(x), approximate=approximate)
    assert output.dtype == dtype
    torch.testing.assert_close(
        output, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype], equal_nan=True
    )
    assert output.isnan().sum() == 150, "other rows"


@pytest.mark.skipif(DEVICE.type == "cpu", reason="GELU with tanh by cuBLAS needs a GPU")
def test_product_with_gelu_by_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "library_rows", 1)
    layer = torch.nn.Linear(72, 152, device=DEVICE).half().requires_grad_(False)
    x = 9 * random(3, 48, 72, dtype=torch.float16)
    output, expected = gelu_product(x, layer, tanh=True), F.gelu(layer(x), approximate="tanh")
    torch.testing.assert_close(output, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("dtype", CLOSE)
def test_sum_and_norm_with_weights(dtype: torch.dtype) -> None:
    norm, x, h = a_norm(80), 3 * random(2, 3, 80) + 1, random(2, 3, 80, dtype=dtype)
    total = x + h.float()
    output = added_norm(x, h, NormVectors.of(norm))
    assert output.dtype == dtype
    assert torch.equal(x, total)
    torch.testing.assert_close(output.float(), norm(x), atol=CLOSE[dtype], rtol=CLOSE[dtype])
