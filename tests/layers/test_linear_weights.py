"""Weights of linear layers: packed in lower precision, copied, and joined."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from testkit.utterances import off
from token2wav.config.settings import DecoderPrecision
from token2wav.layers.packed_linear import INPUT_SCALE, SMALL_SCALE, PackedCopy, PackedWeight
from token2wav.layers.projections import join_projections

ROUNDING = 5e-5  # float32 sums of up to 300 products, up to 60 in size, in another order


# Bits that an input keeps, the least input that keeps them, and the largest input.
KEPT: dict[DecoderPrecision, tuple[int, float, float]] = {
    "float16x3": (22, 2.0**-10, 2.0**4 * 65_504),
    "float16": (11, 2.0**-14, 65_504),
}


@pytest.mark.parametrize("precision", KEPT)
def test_rounded_inputs_keep_their_bits(precision: DecoderPrecision) -> None:
    weight = PackedWeight(torch.randn(3, 4), precision=precision)
    bits, least, most = KEPT[precision]
    exponents = torch.linspace(math.log2(least) - 20, math.log2(most) - 1, 10_000)
    x = 2**exponents * (1 + torch.rand(10_000)) * torch.randn(10_000).sign()
    x[0] = most
    rounded = weight.rounded(x[:, None]).double()
    assert rounded.isfinite().all()
    if precision == "float16x3":
        small, large, again = rounded.T
        assert torch.equal(large, again)
        result = (large + small / SMALL_SCALE) / INPUT_SCALE
    else:
        result = rounded[:, 0]
    error = (result - x).abs() / x.abs().clamp(least)
    assert 2.0**-bits / 8 < error.max() <= 2.0**-bits


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("precision", KEPT)
def test_products_of_rounded_operands(precision: DecoderPrecision, bias: bool) -> None:
    weight, rows = torch.randn(11, 300), torch.randn(2, 5, 300)
    added = torch.randn(11) if bias else None
    product = PackedWeight(weight, added, precision).product(rows)
    exact = rounded = functional.linear(rows, weight, added)
    if precision == "float16":
        rounded = functional.linear(rows.half().float(), weight.half().float(), added)
        assert off(product, exact) > 10 * ROUNDING
    assert product.dtype == torch.float32
    assert off(product, rounded) <= ROUNDING


def test_a_new_weight_or_bias_is_packed_anew() -> None:
    packed = PackedCopy(lambda weight: weight.T, lambda bias: 2 * bias)
    rows, bias = torch.randn(2, 3), torch.randn(4)
    for one in (packed, copy.deepcopy(packed)):
        for weight in (torch.randn(3, 4), torch.randn(3, 4)):
            bias.mul_(3)
            assert one.of(weight, bias) is one.of(weight, bias)
            assert off(one.of(weight, bias).product(rows), rows @ weight + 2 * bias) <= ROUNDING
    assert off(one.of(weight).product(rows), rows @ weight) <= ROUNDING
    assert copy.deepcopy(packed).of(weight) is not packed.of(weight)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_share_the_memory_of_their_joined_weights(bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, outputs, bias=bias) for outputs in (4, 4, 3)]
    x = torch.randn(2, 5)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    weight, joined_bias = join_projections(layers)
    assert (joined_bias is not None) == bias
    # one product sums in another order
    torch.testing.assert_close(functional.linear(x, weight, joined_bias), expected)
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], dim=1), expected)
    assert layers[0].weight.data_ptr() == weight.data_ptr()
    again, _ = join_projections(layers)
    assert again.data_ptr() == weight.data_ptr(), "a second call copies nothing"
    assert torch.equal(again, weight)


def test_converted_layers_are_joined_anew() -> None:
    layers = [nn.Linear(5, 4) for _ in range(3)]
    join_projections(layers)
    for layer in layers:
        layer.half()
    weight, bias = join_projections(layers)
    assert bias is not None
    assert torch.equal(weight, torch.cat([layer.weight for layer in layers]))
    assert torch.equal(bias, torch.cat([layer.bias for layer in layers]))
    assert weight.dtype == torch.float16
