"""Packed weights: the products of torch, layers of a network, and copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from testkit.utterances import off
from token2wav.config.settings import DecoderPrecision
from token2wav.kernels.convolution import tf32
from token2wav.layers import packed_linear
from token2wav.layers.packed_linear import PackedCopy, PackedLinear, PackedWeight, pack_linears

ROUNDING = 5e-5  # float32 sums of up to 300 products, up to 60 in size, in another order


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 7), (2, 3, 7), (40, 300), (300,)], ids=str)
def test_the_products_of_torch(
    shape: tuple[int, ...], bias: bool, available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_AVAILABLE", available and packed_linear._AVAILABLE)
    weight, rows = torch.randn(11, shape[-1]), torch.randn(shape)
    added = torch.randn(11) if bias else None
    product = PackedWeight(weight).product(rows, added)
    assert off(product, functional.linear(rows, weight, added)) <= ROUNDING


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


def test_linear_layers_are_replaced_and_others_are_kept() -> None:
    network = nn.Sequential(
        nn.Linear(5, 4), nn.Sequential(nn.Linear(4, 3).double()), nn.Conv1d(3, 3, 1)
    ).requires_grad_(False)
    x = torch.randn(2, 5)
    expected = network[0](x)
    rounded = copy.deepcopy(network)
    pack_linears(rounded, "float16")
    assert isinstance(rounded[0], PackedLinear)
    assert 0 < off(rounded[0](x), expected) <= 0.01
    pack_linears(network)
    kinds = [type(module) for module in network.modules() if not list(module.children())]
    assert kinds == [
        PackedLinear if packed_linear._AVAILABLE else nn.Linear,
        nn.Linear,  # of double precision
        nn.Conv1d,
    ]
    assert off(network[0](x), expected) <= ROUNDING


def test_a_new_weight_is_packed_anew() -> None:
    packed, rows = PackedCopy(lambda weight: weight.T), torch.randn(2, 3)
    for one in (packed, copy.deepcopy(packed)):
        for weight in (torch.randn(3, 4), torch.randn(3, 5)):
            assert one.of(weight) is one.of(weight)
            assert off(one.of(weight).product(rows), rows @ weight) <= ROUNDING
    assert copy.deepcopy(packed).of(weight) is not packed.of(weight)
