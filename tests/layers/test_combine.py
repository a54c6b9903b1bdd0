"""Layers in sequence and in parallel: their results, and how late their outputs are."""

from __future__ import annotations

import torch
from torch import nn

from token2wav.layers.combine import Chain, Mean, Residual, placed
from token2wav.layers.streaming import OFFLINE, ON_TIME, Delay, causal_conv, centred_conv

X = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))


def test_a_chain_is_as_late_as_all_its_layers() -> None:
    chain = Chain([centred_conv(3, 3, 5), nn.Tanh(), causal_conv(3, 3, 4), centred_conv(3, 3, 7)])
    assert chain.place().delay == 2 + 0 + 3
    expected = X
    for layer in chain:
        expected = layer(expected)
    assert torch.allclose(chain(X), expected)


def test_the_input_of_a_residual_waits_for_its_branch() -> None:
    conv = centred_conv(3, 3, 9)
    residual = Residual(3, {"act": nn.Tanh(), "conv": conv})
    assert residual.place().delay == 4
    assert torch.allclose(residual(X), X + conv(torch.tanh(X)), atol=1e-6)
    assert residual.wait.length == 4


def test_the_branches_of_a_mean_wait_for_the_latest() -> None:
    branches = [centred_conv(3, 3, size) for size in (1, 7, 3)]
    waits = [Delay(3) for _ in branches]
    mean = Mean(branches, waits)
    assert mean.place(ON_TIME).delay == 3
    assert [wait.length for wait in waits] == [3, 0, 2]
    assert torch.allclose(mean(X, OFFLINE), sum(conv(X) for conv in branches) / 3, atol=1e-6)


def test_layers_without_positions_take_no_time() -> None:
    assert placed([nn.Tanh(), nn.Identity()]) == ON_TIME
