"""Packed weights: the products of torch, layers of a network, and copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from testkit.utterances import off
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


def test_linear_layers_are_replaced_and_others_are_kept() -> None:
    network = nn.Sequential(
        nn.Linear(5, 4), nn.Sequential(nn.Linear(4, 3).double()), nn.Conv1d(3, 3, 1)
    ).requires_grad_(False)
    x = torch.randn(2, 5)
    expected = network[0](x)
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
