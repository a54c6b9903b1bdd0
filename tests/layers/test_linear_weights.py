"""Weights of linear layers: packed in lower precision, copied, and joined."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from testkit.utterances import off
from token2wav.config.settings import DecoderPrecision
from token2wav.kernels.convolution import tf32
from token2wav.layers.packed_linear import PackedCopy, PackedWeight
from token2wav.layers.projections import join_projections

ROUNDING = 5e-5  # float32 sums of up to 300 products, up to 60 in size, in another order


# Bits of the mantissa of an operand that its parts keep, rounded to the nearest or cut off.
KEPT_BITS: dict[DecoderPrecision, int] = {"tf32x3": 20, "float16": 11}


@pytest.mark.parametrize("precision", KEPT_BITS)
def test_parts_of_an_operand_keep_its_bits(precision: DecoderPrecision) -> None:
    weight = PackedWeight(torch.randn(3, 4), precision)
    # from the smallest normal float16 to above 1, with all signs
    x = torch.logspace(-4, 4, 1000) * (1 + torch.rand(1000)) * torch.randn(1000).sign()
    parts = weight.split(x)
    assert len(parts) == (2 if precision == "tf32x3" else 1)
    error = (sum(parts) - x).abs() / x.abs()
    bound = 2.0 ** -KEPT_BITS[precision]
    assert bound / 8 < error.max() <= bound
    if precision == "tf32x3":  # each part has the bits of TF32
        assert all(torch.equal(part, tf32(part)) for part in parts)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("precision", KEPT_BITS)
def test_products_of_rounded_operands(precision: DecoderPrecision, bias: bool) -> None:
    weight, rows = torch.randn(11, 300), torch.randn(2, 5, 300)
    added = torch.randn(11) if bias else None
    packed = PackedWeight(weight, precision)
    product = packed.product(rows, added)
    exact = rounded = functional.linear(rows, weight, added)
    if precision == "float16":
        rounded = functional.linear(rows.half().float(), weight.half().float(), added)
        assert off(product, exact) > 10 * ROUNDING
    assert product.dtype == torch.float32
    assert off(product, rounded) <= ROUNDING
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_new_weight_is_packed_anew() -> None:
    packed, rows = PackedCopy(lambda weight: weight.T), torch.randn(2, 3)
    for one in (packed, copy.deepcopy(packed)):
        for weight in (torch.randn(3, 4), torch.randn(3, 5)):
            assert one.of(weight) is one.of(weight)
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
