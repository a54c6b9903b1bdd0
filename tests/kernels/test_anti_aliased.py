"""The anti-aliased activation on its kernel equals its layers in whole sequences and in streams."""

from __future__ import annotations

import copy

import pytest
import torch

from token2wav.cache.states import StateStore
from token2wav.kernels import anti_aliased
from token2wav.layers.snake import Snake
from token2wav.layers.streaming import OFFLINE, StreamStep, Timing, state_specs
from token2wav.networks.bigvgan import AntiAliased

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STREAMS = 2
# Values up to 5 are sums of 6 and 12 float32 products, here added up in another order, and the
# square of the sine has a polynomial of its own. In the interpreter they are off by 1.1e-6 at most.
OFF = 4e-6
# Channels, and whether they follow each other in memory. A program has 1, 8 or 32 of them, and 128,
# 16 or 4 rows.
SIGNALS = [(5, True), (24, True), (24, False), (64, True)]


def a_pair(channels: int, *, beta: bool, timing: Timing) -> tuple[AntiAliased, AntiAliased]:
    """Returns a layer on torch, and the same layer on the kernel."""
    layer = AntiAliased(Snake(channels, beta=beta, log_scale=False)).to(DEVICE)
    for parameter in layer.act.parameters():
        parameter.detach().uniform_(0.5, 3)
    for taps in (layer.upsample.filter, layer.downsample.lowpass.filter):
        taps += 0.05 * torch.randn_like(taps)  # no symmetry hides an error
    layer.act.freeze()
    layer.place(timing)
    on_kernel = copy.deepcopy(layer)
    on_kernel.kernel = anti_aliased.anti_aliased
    return layer, on_kernel


def a_signal(channels: int, length: int, *, channels_last: bool) -> torch.Tensor:
    """Returns a part of a longer signal, in one of two memory orders."""
    if channels_last:
        return torch.randn(STREAMS, length + 3, channels, device=DEVICE)[:, 2:-1].transpose(1, 2)
    return torch.randn(STREAMS, channels, length + 3, device=DEVICE)[:, :, 2:-1]


def check(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape
    assert (result - expected).abs().max() <= OFF


@pytest.mark.parametrize(("length", "beta"), [(1, True), (7, False), (203, True)])
@pytest.mark.parametrize(("channels", "channels_last"), SIGNALS)
def test_whole_sequences(channels: int, length: int, channels_last: bool, beta: bool) -> None:
    layer, on_kernel = a_pair(channels, beta=beta, timing=Timing())
    x = a_signal(channels, length, channels_last=channels_last)
    check(on_kernel(x), layer(x))


@pytest.mark.parametrize(("timing", "longest"), [(Timing(), 64), (Timing(3, -2), 8)])
@pytest.mark.parametrize(("channels", "channels_last"), SIGNALS)
def test_streams(
    channels: int,
    channels_last: bool,
    timing: Timing,
    longest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps are longer and shorter than the states, and as long as several tiles of rows."""
    monkeypatch.setattr(anti_aliased, "_GPU_THREADS", 1)
    monkeypatch.setattr(anti_aliased, "_LONGEST", longest)
    layers = a_pair(channels, beta=True, timing=timing)
    rows = [
        StateStore({"layers": state_specs(layer)}, DEVICE).rows("layers", STREAMS).views
        for layer in layers
    ]
    ends = [(9, 0), (1, 0), (4, 0), (140, 0), (2, 0), (25, 20)]
    for index, (frames, past_end) in enumerate(ends):
        x = a_signal(channels, frames, channels_last=channels_last)
        results = [
            layer(x, StreamStep(state, index == 0, frames, past_end))
            for layer, state in zip(layers, rows, strict=True)
        ]
        check(results[1], results[0])
        for expected, state in zip(*(views.values() for views in rows), strict=True):
            check(state, expected)


def test_a_step_that_starts_and_ends_streams() -> None:
    layer, on_kernel = a_pair(24, beta=True, timing=Timing(2, 1))
    states = [
        {part: torch.zeros(STREAMS, *spec.shape, device=DEVICE) for part, spec in specs.items()}
        for specs in map(state_specs, (layer, on_kernel))
    ]
    x = a_signal(24, 40, channels_last=True)
    expected, result = (
        part(x, StreamStep(state, first=True, frames=40, frames_past_end=20))
        for part, state in zip((layer, on_kernel), states, strict=True)
    )
    check(result, expected)
    # The whole sequence has one value more than frames, and the stream begins 2 + 5 values late.
    whole = layer(x[:, :, 2 : 2 + 21], OFFLINE)
    check(result[:, :, 7 : 7 + 21], whole)
