"""ConvNeXt block: its computation, and no look at later positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from token2wav.layers.convnext import ConvNeXt


def test_computation_without_later_positions() -> None:
    torch.manual_seed(0)
    block, x = ConvNeXt(4, kernel=3).requires_grad_(False), torch.randn(2, 4, 12)
    assert block.place().delay == 0
    assert block.gamma is not None
    block.gamma.copy_(torch.rand(4))
    h = F.conv1d(F.pad(x, (2, 0)), block.dwconv.weight, block.dwconv.bias, groups=4)
    h = F.layer_norm(h.transpose(1, 2), (4,), block.norm.weight, block.norm.bias, eps=1e-6)
    h = block.gamma * block.pwconv2(F.gelu(block.pwconv1(h)))
    assert torch.allclose(block(x), x + h.transpose(1, 2), atol=1e-6)
    assert torch.allclose(block(x)[:, :, :5], block(x[:, :, :5]), atol=1e-6)
