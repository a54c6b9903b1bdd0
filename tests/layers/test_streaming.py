"""Streaming layers in pieces equal the whole, with the declared delays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from testkit.pieces import in_pieces
from testkit.utterances import off
from token2wav.layers import streaming
from token2wav.layers.combine import Chain, Mean, Residual, placed
from token2wav.layers.snake import Snake
from token2wav.layers.streaming import (
    ON_TIME,
    Delay,
    StreamConv,
    StreamConvTranspose,
    StreamModule,
    StreamStep,
    Timing,
    causal_conv,
    centred_conv,
    is_channels_last,
    lookahead_conv,
    round_products,
    state_specs,
)
from token2wav.networks.bigvgan import AntiAliased
from token2wav.networks.hift_layers import Analysis, UpConv

CHANNELS = 3
ROUNDING = 1e-5


class Late(Chain):
    """A layer whose input is late, because of a layer before it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__([lookahead_conv(CHANNELS, CHANNELS, 4), layer])
        self.delay = self.place().delay


def parallel() -> nn.Module:
    """Two ways of different delays, of which the earlier one waits."""
    return Residual(CHANNELS, {"late": centred_conv(CHANNELS, CHANNELS, 7, dilation=2)})


class Parallel(StreamModule):
    """Three ways of different delays, of which the earlier ones wait."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(centred_conv(CHANNELS, CHANNELS, size) for size in (1, 7, 3))
        self.waits = nn.ModuleList(Delay(CHANNELS) for _ in self.branches)
        self.mean = Mean(self.branches, self.waits)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        return self.mean.place(timing)

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        return self.mean(x, step)


def shortened() -> nn.Module:
    """Upsampling whose output is shorter than its inputs, and a convolution that reads later
    positions of it.
    """
    up = StreamConvTranspose(CHANNELS, CHANNELS, 10, 5, cut=(3, 3))
    assert up.place().extra == -1
    return Chain([up, centred_conv(CHANNELS, CHANNELS, 7)])


class Spectrum(StreamModule):
    """STFT of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = Analysis(16, 4)

    def place(self, timing: Timing = ON_TIME) -> Timing:
        assert self.stft.place(timing).extra == 1
        return self.stft.output

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        return self.stft(x[:, :1], step)[:, :, : x.shape[2] // 4]  # the whole has one window more


def snake() -> Snake:
    activation = Snake(CHANNELS, beta=True, log_scale=False)
    activation.freeze()
    return activation


def upsampling() -> nn.Module:
    conv = UpConv(CHANNELS, CHANNELS, 5, 4).eval().requires_grad_(False)
    conv.freeze()
    return conv


def transposed(kernel: int, stride: int, **options: Any) -> nn.Module:
    return StreamConvTranspose(CHANNELS, CHANNELS, kernel, stride, **options)


LAYERS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "causal": (lambda: causal_conv(CHANNELS, CHANNELS, 5, dilation=3), 1),
    "ahead": (lambda: lookahead_conv(CHANNELS, CHANNELS, 3), 1),
    "centred": (lambda: centred_conv(CHANNELS, CHANNELS, 5, dilation=2), 1),
    "one tap": (lambda: causal_conv(CHANNELS, CHANNELS, 1), 1),
    "strided": (lambda: StreamConv(CHANNELS, CHANNELS, 7, left=3, stride=4), 0.25),
    "transposed": (lambda: transposed(8, 4), 4),
    "transposed, causal": (lambda: transposed(7, 4, cut="end", groups=CHANNELS), 4),
    "transposed, shorter": (lambda: transposed(8, 4, cut="both"), 4),
    "transposed, cut by numbers": (shortened, 5),
    "causal, in groups": (lambda: causal_conv(CHANNELS, CHANNELS, 4, groups=CHANNELS), 1),
    "transposed, no overlap": (lambda: transposed(3, 3), 3),
    "repeated": (upsampling, 4),
    "activated": (lambda: Chain([snake(), centred_conv(CHANNELS, CHANNELS, 3), snake()]), 1),
    "anti-aliased": (lambda: AntiAliased(snake()), 1),
    "residual": (parallel, 1),
    "mean": (Parallel, 1),
    "spectrum": (Spectrum, 0.25),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("lengths", [[20, 20, 20], [40, 4, 4, 12], [20, 36, 4], [60]], ids=str)
def test_pieces_equal_the_whole(name: str, lengths: list[int], channels_last: bool) -> None:
    torch.manual_seed(0)
    make, ratio = LAYERS[name]
    network = Late(make()).requires_grad_(False)
    x = torch.randn(2, CHANNELS, 60)
    whole = network(x)
    x = in_order(x, channels_last)
    assert off(network(x), whole) <= ROUNDING
    output = in_pieces(network, x, lengths, delay=network.delay, ratio=ratio)
    assert off(output[:, :, : whole.shape[2]], whole) <= ROUNDING


def in_order(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Returns x (B, C, T) with memory in the order of the axes, or with channels last."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else x


@pytest.fixture(params=["as on a CPU", "as on a GPU", "as on a GPU, divided"])
def always_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether all convolutions are products, as on a GPU, and whether long ones are divided."""
    always = request.param != "as on a CPU"
    monkeypatch.setattr(streaming, "_always_multiplies", lambda *_: always)
    if request.param.endswith("divided"):
        monkeypatch.setattr(streaming, "_MOST_WINDOW_BYTES", 2000)
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
@pytest.mark.parametrize("count", [5, 33])
@pytest.mark.parametrize("cut", ["end", "both", (2, 1)], ids=str)
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (8, 4), (7, 4), (5, 1), (9, 4)])
@pytest.mark.parametrize(("inputs", "groups"), [(5, 1), (8, 4), (4, 4)])
@pytest.mark.usefixtures("always_products")
def test_transposed_convolutions_equal_those_of_torch(
    inputs: int, groups: int, kernel: int, stride: int, cut: Any, count: int, channels_last: bool
) -> None:
    conv = StreamConvTranspose(inputs, 4, kernel, stride, cut=cut, groups=groups)
    conv.requires_grad_(False)
    x = torch.randn(2, inputs, count)
    expected = nn.functional.conv_transpose1d(x, conv.weight, conv.bias, stride, groups=groups)
    output = conv(in_order(x, channels_last))
    overlap = conv.overlap
    assert (
        off(output, expected[:, :, overlap.cut : expected.shape[2] - overlap.cut_end]) <= ROUNDING
    )


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


def test_the_delay_equals_the_lookahead_of_a_layer() -> None:
    for name, (make, ratio) in LAYERS.items():
        torch.manual_seed(0)
        network, x = Late(make()).requires_grad_(False), torch.randn(1, CHANNELS, 60)
        changed = x.clone()
        changed[:, :, 40:] += torch.rand(20)
        moved = (network(changed) - network(x)).abs().amax(dim=1)[0].nonzero().flatten()
        assert int(moved.min()) == int(40 * ratio) - network.delay, name


def test_specs_of_layer_states() -> None:
    network = Chain(
        [causal_conv(3, 5, 4, dilation=2), causal_conv(5, 7, 1), Delay(7, 0), Delay(7, 2)]
    )
    network.place()
    specs = state_specs(network)
    assert [(spec.name, spec.shape, spec.dtype) for spec in specs.values()] == [
        ("0", (3, 6), torch.float32),
        ("3", (7, 2), torch.float32),
    ]
    assert [spec.dtype for spec in state_specs(network.double()).values()] == [
        torch.float64,
        torch.float32,
    ]


def test_a_layer_that_was_not_placed_is_refused() -> None:
    network = nn.Sequential(causal_conv(3, 3, 1), Chain([causal_conv(3, 3, 4)]))
    placed(list(network)[:1])
    with pytest.raises(RuntimeError, match=r"Sequential: layer 1\.0 was not placed"):
        state_specs(network)
