"""Noise by position: a stream gets the noise of the whole, also after the noise repeats."""

from __future__ import annotations

import pytest
import torch

from token2wav.layers import position_noise
from token2wav.layers.position_noise import PositionNoise, noise_table
from token2wav.layers.streaming import StreamStep, Timing

_CHANNELS, _LATE = 3, 5


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> PositionNoise:
    monkeypatch.setattr(position_noise, "_PERIOD", 16)
    made = PositionNoise(_CHANNELS, seed=4).eval().requires_grad_(False)
    made.place(Timing(_LATE))
    torch.nn.init.normal_(made.linear.weight)
    made.freeze()
    return made


def test_streams_of_a_batch_have_the_noise_of_the_whole(layer: PositionNoise) -> None:
    """The input is late by 5 positions, and longer than the noise."""
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


def test_streams_of_a_batch_may_be_at_different_positions(layer: PositionNoise) -> None:
    signal = torch.randn(1, _CHANNELS, 4).expand(2, -1, -1)
    step = StreamStep({layer: torch.tensor([[6.0], [9.0]])}, frames=4)
    output = layer(signal, step)
    for row, first in enumerate((6, 9)):
        positions = (torch.arange(first, first + 4) - _LATE) % 16
        expected = signal[row] + layer.table[positions] * layer.linear(signal[row])
        assert torch.allclose(output[row], expected, atol=1e-6)


def test_a_step_past_the_end_keeps_the_state(layer: PositionNoise) -> None:
    state = torch.tensor([[6.0]])
    step = StreamStep({layer: state}, frames=4, frames_past_end=2)
    layer(torch.randn(1, _CHANNELS, 4), step)
    assert state.item() == 6


def test_the_noise_of_a_layer() -> None:
    drawn = noise_table(0)
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.std()) - 1) < 0.01
    assert torch.equal(drawn, noise_table(0))
    assert not torch.equal(drawn, noise_table(1))
