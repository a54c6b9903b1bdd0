"""Values that `HiFT.freeze` computes beforehand change only the rounding of the audio."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from token2wav.networks.hift_layers import FoldableSnake, ResBlock, UpConv


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kernel", "rate"), [(16, 8), (11, 5), (7, 3), (3, 2), (1, 4), (5, 1)])
def test_upsampling_without_repeats(kernel: int, rate: int) -> None:
    conv, x = UpConv(6, 4, kernel, rate).requires_grad_(False).eval(), random(2, 6, 20)
    conv.freeze()
    repeated = F.pad(x.repeat_interleave(rate, dim=2), (kernel - 1, 0))
    expected = F.conv1d(repeated, conv.weight, conv.bias)
    assert torch.allclose(conv(x), expected, atol=1e-6)


def published(block: ResBlock, x: torch.Tensor) -> torch.Tensor:
    def snake(x: torch.Tensor, activation: FoldableSnake) -> torch.Tensor:
        alpha = activation.alpha[:, None]
        return x + torch.sin(alpha * x) ** 2 / (alpha + 1e-9)

    layers = zip(block.activations1, block.convs1, block.activations2, block.convs2, strict=True)
    for snake1, conv1, snake2, conv2 in layers:
        assert isinstance(snake1, FoldableSnake)
        assert isinstance(snake2, FoldableSnake)
        x = x + conv2(snake(conv1(snake(x, snake1)), snake2))
    return x


@pytest.mark.parametrize("least", [0.0, 1e-3, 0.02, 0.5], ids=str)
def test_slopes_in_the_weights_of_convolutions(least: float) -> None:
    """Slopes of 0 and near it, too, by which nothing can be divided."""
    block, x = ResBlock(5, 3, (1, 3)).requires_grad_(False), random(2, 5, 40)
    for number, module in enumerate(block.modules()):
        if isinstance(module, FoldableSnake):
            module.alpha.copy_(least + random(5, seed=number).abs())
            module.alpha[number % 5] = -least
        if torch.nn.utils.parametrize.is_parametrized(module, "weight"):
            torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    expected = published(block, x)
    for module in block.modules():
        if isinstance(module, FoldableSnake):
            module.freeze()
    block.freeze()
    assert float((block(x) - expected).abs().max()) <= 2e-6 * float(expected.abs().max())
