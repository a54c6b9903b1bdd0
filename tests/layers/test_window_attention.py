"""Attention with a sliding window: the scores of a whole sequence, angles, and broken streams. The
contract of codecs compares streams and batches with the whole.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testkit.utterances import off
from token2wav.cache.states import StateStore
from token2wav.layers import window_attention
from token2wav.layers.combine import placed
from token2wav.layers.streaming import OFFLINE, StreamStep, state_specs
from token2wav.layers.window_attention import (
    PositionCounter,
    WindowAttention,
    rotary_angles,
    rotate,
)

HEADS, DIM_HEAD, WINDOW, LENGTH = 4, 4, 5, 23
ROUNDING = 1e-6  # float32, for values of about 1


class Layer(nn.Module):
    """Attention layer with rotary positions.

    Args:
        key_heads: heads of keys and values.
    """

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.heads = [HEADS, key_heads, key_heads]
        self.qkv = nn.Linear(HEADS * DIM_HEAD, sum(self.heads) * DIM_HEAD)
        self.positions = PositionCounter(WINDOW)
        self.attention = WindowAttention(key_heads, DIM_HEAD, WINDOW)
        placed((self.positions, self.attention))

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns queries, keys and values (B, T, heads, DIM_HEAD)."""
        return self.qkv(x).unflatten(-1, (-1, DIM_HEAD)).split(self.heads, dim=2)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        positions = self.positions(x, self.attention, step)
        angles = rotary_angles(positions.values, DIM_HEAD, 100.0)
        q, k, v = self.projected(x)
        return self.attention(q, k, v, positions, angles, step).flatten(2)


@pytest.fixture(
    params=[(6, HEADS), (32, HEADS), (6, 2)],
    ids=["parts of 6", "parts of 32", "keys that heads share"],
)
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layer:
    """Layer whose rings are shorter or longer than the sequences."""
    most_new, key_heads = request.param
    monkeypatch.setattr(window_attention, "_MOST_NEW", most_new)
    torch.manual_seed(2)
    return Layer(key_heads).requires_grad_(False)


@pytest.fixture(params=[False, True], ids=["rows", "in place"])
def store(request: pytest.FixtureRequest, layer: Layer) -> StateStore:
    specs = {"layer": state_specs(layer)}
    return StateStore(specs, torch.device("cpu"), in_place=request.param)


def advance(
    layer: Layer, store: StateStore, slots: list[int], x: torch.Tensor, *, first: bool
) -> torch.Tensor:
    rows, where = store.rows("layer", len(x)), torch.tensor(slots)
    store.read(where, rows)
    states = store.states_of(slots, torch.tensor(store.offsets(slots)), rows)
    y = layer(x, StreamStep(states, first=first, frames=x.shape[1]))
    store.write(where, rows)
    return y


def test_a_whole_sequence_equals_full_scores(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window cuts off scores, also where the queries are computed in several blocks."""
    monkeypatch.setattr(window_attention, "_BLOCK", 7)
    x = torch.randn(2, LENGTH, HEADS * DIM_HEAD)
    angles = rotary_angles(torch.arange(LENGTH)[None], DIM_HEAD, 100.0)
    q, k, v = layer.projected(x)
    k, v = (value.repeat_interleave(HEADS // value.shape[2], dim=2) for value in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", rotate(q, angles), rotate(k, angles)) / DIM_HEAD**0.5
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), -torch.inf)
    expected = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2)
    assert off(layer(x), expected) <= ROUNDING


def test_angles_are_rounded_as_a_table_of_lower_precision() -> None:
    """At far positions too, where the last bit of a frequency changes the rounded value."""
    positions = torch.arange(20_000)
    frequencies = 1 / 10_000 ** (torch.arange(0, 64, 2) / 64)
    table = torch.outer(positions, frequencies).repeat(1, 2)
    for angles, function in zip(
        rotary_angles(positions[None], 64, 10_000.0, torch.bfloat16),
        (torch.cos, torch.sin),
        strict=True,
    ):
        assert angles.dtype == torch.float32
        assert torch.equal(angles[0], function(table).bfloat16().float())


def test_the_values_of_a_broken_stream_stay_in_it(layer: Layer, store: StateStore) -> None:
    """NaN in one row changes no other row, and is gone when its slot begins anew."""
    x = torch.randn(2, LENGTH, HEADS * DIM_HEAD)
    slots = [store.take() for _ in x]
    broken = x.clone()
    broken[0] = torch.nan
    assert off(advance(layer, store, slots, broken, first=True)[1], layer(x)[1]) <= ROUNDING
    assert off(advance(layer, store, slots, x, first=True), layer(x)) <= ROUNDING
