"""Feed-forward parts: their computation, and the names of their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from token2wav.layers.feed_forward import FeedForward, GatedFeedForward

X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))


def test_two_layers_around_an_activation() -> None:
    layer = FeedForward(4, 6, F.silu, names=("w_1", "w_2"), bias=True)
    weights = layer.state_dict()
    assert list(weights) == ["w_1.weight", "w_1.bias", "w_2.weight", "w_2.bias"]
    hidden = F.silu(X @ weights["w_1.weight"].T + weights["w_1.bias"])
    expected = hidden @ weights["w_2.weight"].T + weights["w_2.bias"]
    assert torch.allclose(layer(X), expected, atol=1e-6)


def test_the_gate_is_the_first_layer() -> None:
    layer = GatedFeedForward(4, 6, names=("w1", "w3", "w2"))
    gate, up, down = (layer.state_dict()[f"{name}.weight"] for name in ("w1", "w3", "w2"))
    expected = (F.silu(X @ gate.T) * (X @ up.T)) @ down.T
    assert torch.allclose(layer(X), expected, atol=1e-6)
