"""Noise by position repeats. Before that, the golden audio of SNAC tests it."""

from __future__ import annotations

import pytest
import torch

from token2wav.layers import position_noise
from token2wav.layers.position_noise import PositionNoise
from token2wav.layers.streaming import StreamStep, Timing

_CHANNELS, _LATE = 3, 5


def test_streams_of_a_batch_have_the_noise_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input is late by 5 positions, and longer than the noise."""
    monkeypatch.setattr(position_noise, "_PERIOD", 16)
    layer = PositionNoise(_CHANNELS, seed=4).eval().requires_grad_(False)
    layer.place(Timing(_LATE))
    torch.nn.init.normal_(layer.linear.weight)
    layer.freeze()
    signal = torch.randn(2, _CHANNELS, 40)
    whole = layer(signal)
    late = torch.cat((torch.zeros(2, _CHANNELS, _LATE), signal), dim=2)
    state = torch.full((2, 1), torch.nan)  # not read in the first step
    parts, start = [], 0
    for stop in (7, 8, 31, 45):
        step = StreamStep({layer: state}, first=start == 0, frames=stop - start)
        parts.append(layer(late[:, :, start:stop], step))
        start = stop
    assert torch.allclose(torch.cat(parts, dim=2)[:, :, _LATE:], whole, atol=1e-6)
    assert state.tolist() == [[45 % 16]] * 2
