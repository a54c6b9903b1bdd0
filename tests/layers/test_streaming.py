"""Convolutions of streaming layers as matrix products, and layers without a place. The contract of
codecs, `families/test_codec_contract.py`, compares streams with the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from testkit.utterances import off
from token2wav.layers import convolutions
from token2wav.layers.combine import Chain, placed
from token2wav.layers.convolutions import StreamConvTranspose, causal_conv, round_products
from token2wav.layers.streaming import is_channels_last, state_specs

ROUNDING = 1e-5


def in_order(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Returns x (B, C, T) with memory in the order of the axes, or with channels last."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else x


@pytest.fixture(params=["as on a CPU", "as on a GPU", "as on a GPU, divided"])
def always_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether all convolutions are products, as on a GPU, and whether long ones are divided."""
    always = request.param != "as on a CPU"
    monkeypatch.setattr(convolutions, "_always_multiplies", lambda *_: always)
    if request.param.endswith("divided"):
        monkeypatch.setattr(convolutions, "_MOST_WINDOW_BYTES", 2000)
    return always


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 32, 300])
@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (7, 3)])
def test_convolutions_equal_those_of_torch(
    kernel: int, dilation: int, count: int, channels_last: bool, always_products: bool
) -> None:
    """A CPU computes those of few positions as matrix products, and a GPU all of them."""
    conv = causal_conv(5, 4, kernel, dilation=dilation).requires_grad_(False)
    x = torch.randn(2, 5, count)
    padded = nn.functional.pad(x, ((kernel - 1) * dilation, 0))
    expected = nn.functional.conv1d(padded, conv.weight, conv.bias, dilation=dilation)
    output = conv(in_order(x, channels_last))
    assert off(output, expected) <= ROUNDING
    assert is_channels_last(output) == (channels_last or always_products) or count == 1


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda groups: causal_conv(8, 4, 7, dilation=3, groups=groups),
        lambda groups: StreamConvTranspose(8, 4, 8, 4, cut="end", groups=groups),
    ],
    ids=["convolution", "transposed"],
)
def test_operands_of_convolutions_are_rounded_except_in_groups(
    make: Callable[[int], nn.Module], channels_last: bool
) -> None:
    x = torch.randn(2, 8, 300)
    for groups in (1, 4):
        conv = make(groups).requires_grad_(False)
        halved = copy.deepcopy(conv)
        assert isinstance(halved.weight, nn.Parameter)
        halved.weight.copy_(halved.weight.half())
        exact, expected = conv(x), halved(x.half().float())
        round_products(conv, "float16")
        output = conv(in_order(x, channels_last))
        assert off(output, expected if groups == 1 else exact) <= ROUNDING
        assert off(expected, exact) > 10 * ROUNDING


def test_a_layer_that_was_not_placed_is_refused() -> None:
    network = nn.Sequential(causal_conv(3, 3, 1), Chain([causal_conv(3, 3, 4)]))
    placed(list(network)[:1])
    with pytest.raises(RuntimeError, match=r"Sequential: layer 1\.0 was not placed"):
        state_specs(network)
