"""Snake activation: its formula, on a linear and on a logarithmic scale."""

from __future__ import annotations

import pytest
import torch

from token2wav.layers.snake import Snake


@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("log_scale", [False, True])
def test_formula(beta: bool, log_scale: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Snake(3, beta=beta, log_scale=log_scale).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(torch.rand(3, generator=generator) + 0.1)
    layer.freeze()
    x, out = torch.randn(2, 3, 7, generator=generator), torch.empty(2, 3, 7)
    frequency = layer.alpha.exp() if log_scale else layer.alpha
    divisor = frequency if layer.beta is None else layer.beta.exp() if log_scale else layer.beta
    expected = x + torch.sin(frequency[:, None] * x) ** 2 / divisor[:, None]
    assert torch.allclose(layer(x, out), expected, atol=1e-6)
    assert torch.equal(out, layer(x))
