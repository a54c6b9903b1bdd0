from __future__ import annotations

import pytest
import torch
from torch import nn

from token2wav.layers.projections import join_projections


@pytest.mark.parametrize("bias", [True, False])
def test_layers_share_the_memory_of_their_joined_weights(bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, outputs, bias=bias) for outputs in (4, 4, 3)]
    x = torch.randn(2, 5)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    weight, joined_bias = join_projections(layers)
    assert (joined_bias is not None) == bias
    # one product sums in another order
    torch.testing.assert_close(nn.functional.linear(x, weight, joined_bias), expected)
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
