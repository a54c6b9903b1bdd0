"""The emulation of TF32 that `benchmarks.f0_precision` compares with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.f0_precision import TensorFloat32, rounded


def test_ten_bits_of_mantissa_are_left() -> None:
    given = torch.tensor([1 + 2.0**-10, 1 + 2.0**-11, 1 + 2.0**-12, -1 - 2.0**-11, 0.0, 3e-20])
    assert torch.equal(rounded(given)[:5], torch.tensor([1 + 2.0**-10, 1 + 2.0**-10, 1.0, -1 - 2.0**-10, 0.0]))
    random = torch.randn(10000, generator=torch.Generator().manual_seed(0))
    assert float(((rounded(random) - random) / random).abs().max()) <= 2.0**-11
    assert torch.equal(rounded(rounded(random)), rounded(random))


def test_only_float32_convolutions_are_rounded() -> None:
    conv, x = nn.Conv1d(4, 4, 3).requires_grad_(False), torch.randn(1, 4, 20)
    expected = F.conv1d(rounded(x), rounded(conv.weight), conv.bias)
    with TensorFloat32():
        assert torch.equal(conv(x), expected)
        double = conv.double()(x.double())
    assert torch.equal(double, conv(x.double()))
