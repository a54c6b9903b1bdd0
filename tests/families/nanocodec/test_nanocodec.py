"""Activation of NanoCodec."""

from __future__ import annotations

import torch

from token2wav.families.nanocodec.network import HalfSnake


def test_the_activation_can_be_trained() -> None:
    layer, x = HalfSnake(5), torch.randn(2, 5, 7, requires_grad=True)
    trained = layer(x)
    trained.sum().backward()
    assert layer.alpha.grad is not None
    assert x.grad is not None
    with torch.no_grad():
        layer.freeze()
        torch.testing.assert_close(layer(x), trained)
