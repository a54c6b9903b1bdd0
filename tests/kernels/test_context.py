"""The kernel of inputs with their context equals torch, in both memory orders, and networks stream
on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from testkit.models.bigvgan import SMALL, random_bigvgan
from testkit.models.codec_models import drawn_tokens
from testkit.models.folders import write_folder
from testkit.models.golden import TINY
from tests.kernels.conftest import on_kernels
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, assembly
from token2wav.backends import LoadContext
from token2wav.cache.states import StateStore
from token2wav.config.settings import DecoderPrecision
from token2wav.execution.cuda_graphs import SWITCH
from token2wav.families.nanocodec.network import HalfSnake
from token2wav.kernels import context
from token2wav.kernels.layer_kernels import set_kernels
from token2wav.layers import convolutions
from token2wav.layers.convolutions import StreamConv, causal_conv, centred_conv
from token2wav.layers.packed_linear import PARTS, PackedWeight
from token2wav.layers.snake import Snake
from token2wav.layers.streaming import (
    OFFLINE,
    ContextKernels,
    Curve,
    FreezableLayer,
    KernelContext,
    StreamStep,
    Timing,
    is_channels_last,
    state_specs,
)
from token2wav.networks.seanet_decoder import ELU
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.published.registry import read_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STREAMS, CHANNELS = 2, 37  # more than one tile of channels
# Libraries round the sine differently, by two units in the last place at most. A GPU fuses the sum
# with the product. Results are near 1.
CLOSE = 1e-6
# Of whole networks, relative to the spread of their audio: 5e-6 in the interpreter. On a GPU the
# products of both memory orders, and of pieces of other lengths, add up their sums in other orders.
CLOSE_AUDIO = 1e-5 if DEVICE.type == "cpu" else 5e-5
# A GPU cuts off bits of the sums of three float16 products, in an order of its own. In float16 an
# operand in the middle of two numbers may round either way.
CLOSE_ROUNDED: dict[DecoderPrecision, float] = {
    "float32": CLOSE_AUDIO,
    "float16x3": 1e-5 if DEVICE.type == "cpu" else 5e-4,
    "float16": 0.02,
}
ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "Snake": lambda: Snake(CHANNELS, beta=True, log_scale=True),
    "Snake and LeakyReLU": lambda: HalfSnake(CHANNELS),
    "ELU": ELU,
}
# Frames of each step, and those past the end. Steps are shorter and longer than states and tiles.
STEPS = [(12, 0), (1, 0), (4, 0), (70, 0), (2, 0), (25, 20)]


def an_activation(name: str) -> Any:
    """Makes an activation; no kernel computes SiLU."""
    activation = nn.SiLU() if name == "SiLU" else ACTIVATIONS[name]()
    if isinstance(activation, FreezableLayer):
        activation.requires_grad_(False).to(DEVICE)
        for parameter in activation.parameters():
            parameter.copy_(0.5 + torch.rand_like(parameter))
        activation.freeze()
    return activation


def a_signal(positions: int, channels_last: bool) -> torch.Tensor:
    """Returns a signal (STREAMS, CHANNELS, positions) in the middle of a longer one."""
    shape = (positions + 5, CHANNELS) if channels_last else (CHANNELS, positions + 5)
    x = 3 * torch.randn(STREAMS, *shape, device=DEVICE)
    return (x.transpose(1, 2) if channels_last else x)[:, :, 3 : 3 + positions]


def on_kernel(network: nn.Module) -> Any:
    network = copy.deepcopy(network)
    set_kernels(network)
    return network


def states_of(network: nn.Module) -> Any:
    states = StateStore({"layers": state_specs(network)}, DEVICE).rows("layers", STREAMS).views
    for state in states.values():  # as of a stream before
        state.fill_(torch.nan if state.is_floating_point() else 1)
    return states


def check_states(states: Any, expected: Any, close: float) -> None:
    for state, value in zip(states.values(), expected.values(), strict=True):
        torch.testing.assert_close(state, value, atol=close, rtol=close, equal_nan=True)


def with_context(
    conv: StreamConv, x: torch.Tensor, step: StreamStep, activation: Any, order: bool | None = None
) -> torch.Tensor:
    return step.with_context(
        conv, x, conv.left, conv.right or None, activation=activation, channels_last=order
    )


@pytest.mark.parametrize("into", [None, False, True], ids=["order of x", "axes", "channels last"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(
    "conv",
    [
        causal_conv(CHANNELS, 1, 6),
        centred_conv(CHANNELS, 1, 11, dilation=5),
        causal_conv(CHANNELS, 1, 65),
    ],
    ids=["5", "50, ahead too", "64"],
)
def test_streams(conv: StreamConv, name: str, channels_last: bool, into: bool | None) -> None:
    conv.place(Timing(3, -2))
    layers = conv, on_kernel(conv)
    activation = an_activation(name)
    close = 0.0 if name == "none" else CLOSE
    states = [states_of(layer) for layer in layers]
    for index, (frames, past_end) in enumerate(STEPS):
        x = a_signal(frames, channels_last)
        expected, result = (
            with_context(
                layer, x, StreamStep(state, index == 0, frames, past_end), activation, into
            )
            for layer, state in zip(layers, states, strict=True)
        )
        torch.testing.assert_close(result, expected, atol=close, rtol=close)
        assert is_channels_last(result) == (channels_last if into is None else into)
        check_states(states[1], states[0], close)


@pytest.mark.parametrize("precision", PARTS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "conv",
    [
        causal_conv(CHANNELS, 1, 1),
        causal_conv(CHANNELS, 1, 6),
        centred_conv(CHANNELS, 1, 11, dilation=5),
    ],
    ids=["1", "6", "11, dilated"],
)
def test_windows(conv: StreamConv, channels_last: bool, precision: DecoderPrecision) -> None:
    conv.place(Timing(3, -2))
    [taps], [dilation] = conv.kernel_size, conv.dilation
    right = conv.right or None
    weight = PackedWeight(torch.randn(1, 1, device=DEVICE), precision=precision)
    states = [states_of(conv) for _ in range(2)]
    for index, (frames, past_end) in enumerate([*STEPS, (40, 0)]):
        x = a_signal(frames, channels_last)
        step, other = (StreamStep(state, index == 0, frames, past_end) for state in states)
        if index == len(STEPS):
            step = other = OFFLINE
        joined = step.with_context(conv, x, conv.left, right)
        windows = joined.unfold(2, (taps - 1) * dilation + 1, 1)[..., ::dilation]
        expected = weight.rounded(windows.permute(0, 2, 3, 1).flatten(2))
        found = other.kernel_context(conv, frames, conv.left, right)
        rows = context.windows(x, found, None, taps, dilation, precision)
        assert rows.dtype == expected.dtype
        assert torch.equal(rows, expected)
        check_states(states[1], states[0], 0.0)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("conv", "name"),
    [
        (causal_conv(CHANNELS, CHANNELS, 1, groups=CHANNELS), "Snake"),
        (
            centred_conv(CHANNELS, CHANNELS, 11, dilation=5, groups=CHANNELS, bias=False),
            "Snake and LeakyReLU",
        ),
        (causal_conv(CHANNELS, CHANNELS, 7, groups=CHANNELS), "ELU"),
        (causal_conv(CHANNELS, CHANNELS, 65, groups=CHANNELS), "none"),
    ],
    ids=["1", "11, dilated, ahead too", "7", "65"],
)
def test_depthwise_convolutions(conv: StreamConv, name: str, channels_last: bool) -> None:
    conv.requires_grad_(False).to(DEVICE).place(Timing(3, -2))
    layers, activation = (conv, on_kernel(conv)), an_activation(name)
    states = [states_of(layer) for layer in layers]
    for index, (frames, past_end) in enumerate([*STEPS, (40, 0)]):
        x = a_signal(frames, channels_last)
        expected, result = (
            layer(x, StreamStep(state, index == 0, frames, past_end), activation)
            if index < len(STEPS)
            else layer(x, OFFLINE, activation)
            for layer, state in zip(layers, states, strict=True)
        )
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        check_states(states[1], states[0], CLOSE)


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_streams_whose_windows_do_not_fit_together(
    missing_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = causal_conv(CHANNELS, 5, 6).requires_grad_(False).to(DEVICE)
    conv.place()
    layers = conv, on_kernel(conv)
    states = [states_of(layer) for layer in layers]
    for index, (frames, past_end) in enumerate([(12, 0), (1, 0), (12, 0), (12, 4), (12, 0)]):
        x = a_signal(frames, True)
        of_a_stream = x[0].numel() * 6 * x.element_size()
        monkeypatch.setattr(convolutions, "_MOST_WINDOW_BYTES", of_a_stream - missing_bytes)
        expected, result = (
            layer(x, StreamStep(state, index == 0, frames, past_end) if index < 4 else OFFLINE)
            for layer, state in zip(layers, states, strict=True)
        )
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        check_states(states[1], states[0], 0.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of infinity and NaN
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", [*ACTIVATIONS, "SiLU"])
@pytest.mark.parametrize("positions", [67, 1])
@pytest.mark.parametrize("conv", [causal_conv(CHANNELS, 1, 1), centred_conv(CHANNELS, 1, 7)])
def test_whole_sequences(conv: StreamConv, positions: int, name: str, channels_last: bool) -> None:
    x, activation = a_signal(positions, channels_last), an_activation(name)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], device=DEVICE)
    x[0, :, :1] = special.repeat(CHANNELS)[:CHANNELS, None]
    expected, result = (
        with_context(layer, x, OFFLINE, activation) for layer in (conv, on_kernel(conv))
    )
    torch.testing.assert_close(result, expected, atol=CLOSE, rtol=CLOSE, equal_nan=True)
    assert is_channels_last(result) == channels_last or positions == 1


@pytest.mark.parametrize(("most", "off"), [(10, 4e-7), (1e4, 4e-7), (1e9, 2)])
def test_square_of_the_sine(most: float, off: float) -> None:
    """It is off by 3e-7, where the sine of float32 is off by 1e-7."""
    x = 2 * torch.rand(1, 1, 4096, device=DEVICE) - 1
    factor, one = torch.full((1, 1), most, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    result = context.with_context(x, KernelContext(), Curve(factor, one))
    assert (result - (x + (x * factor).double().sin().square())).abs().max() <= off


@pytest.mark.parametrize("name", ["nanocodec", "snac", "mimi", "bigvgan"])
def test_networks_stream_on_the_kernel(name: str, tmp_path: Path) -> None:
    network: Any
    if name == "bigvgan":
        network = random_bigvgan(SMALL).to(DEVICE)
    else:
        folder = write_folder(name, tmp_path)
        network = assembly.load_network(folder, read_config(folder), "decoder").to(DEVICE)
    assert isinstance(network, WaveformNetwork)
    networks = network, on_kernel(network)
    states = [states_of(each) for each in networks]
    first, lookahead = network.first_frames, network.lookahead_frames
    for index, (frames, past_end) in enumerate(
        [(first + 3, 0), (1, 0), (7, 0), (lookahead, lookahead)]
    ):
        size = STREAMS, network.input_channels, frames
        x = torch.randn(size) if name == "bigvgan" else torch.randint(4, size, dtype=torch.int32)
        if not frames:
            continue
        expected, result = (
            each(x.to(DEVICE), StreamStep(state, index == 0, frames, past_end))
            for each, state in zip(networks, states, strict=True)
        )
        assert (result - expected).abs().max() <= CLOSE_AUDIO * expected.std()
        check_states(states[1], states[0], CLOSE_AUDIO)


@pytest.mark.parametrize(
    ("codec", "precision"),
    [*(("nanocodec", precision) for precision in PARTS), ("snac", "float32")],
)
def test_codecs_run_on_the_kernel(
    codec: str, precision: DecoderPrecision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = RuntimeConfig(device=DEVICE.type, decoder_precision=precision)
    folder, stream = write_folder(codec, tmp_path), StreamConfig(lookahead_frames=0)
    launched: list[str] = []

    def counted(name: str, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            launched.append(name)
            return kernel(x, *rest, **options)

        return run

    for name in ContextKernels._fields:
        monkeypatch.setattr(context, name, counted(name, getattr(context, name)))
    monkeypatch.setenv(SWITCH, "0")
    reference = Token2Wav.load(folder, stream=stream, runtime=runtime)
    tokens = drawn_tokens(reference.config, 20)
    expected = reference.synthesize(tokens)
    assert not launched
    on_kernels(monkeypatch)
    monkeypatch.delenv(SWITCH)
    model = Token2Wav.load(folder, stream=stream, runtime=runtime)
    audio = model.synthesize(tokens)
    expected_kernels = {"with_context", "windows"} | ({"depthwise"} if codec == "snac" else set())
    assert {*launched} == expected_kernels
    assert np.abs(audio - expected).max() <= CLOSE_ROUNDED[precision] * expected.std()


@pytest.mark.parametrize(
    ("precision", "decoder_precision", "expected"),
    [
        ("float32", "float32", "float32"),
        ("float16", "float32", "float16x3"),
        ("float16", "float16", "float16"),
    ],
)
def test_precision_of_bigvgan(
    precision: Literal["float32", "float16"],
    decoder_precision: DecoderPrecision,
    expected: DecoderPrecision,
) -> None:
    runtime = RuntimeConfig(precision=precision, decoder_precision=decoder_precision)
    model = assembly.Assembly(LoadContext(TINY, runtime, DEVICE), read_config(TINY), StreamConfig())
    bigvgan = random_bigvgan(SMALL)
    assert model._product_precision("vocoder", bigvgan, True) == expected
    assert model._product_precision("vocoder", bigvgan, False) == "float32"
    assert model._product_precision("vocoder", nn.Module(), True) == "float32"  # HiFT
    assert model._product_precision("flow", nn.Module(), True) == "float32"
