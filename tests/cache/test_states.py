"""State store: states of the streaming layers of many streams, in slots."""

from __future__ import annotations

import torch

from token2wav.cache.states import SCRATCH_SLOT, StateStore
from token2wav.layers.convolutions import causal_conv
from token2wav.layers.streaming import state_specs
from token2wav.layers.window_attention import WindowAttention


def test_more_streams_than_slots() -> None:
    """The states of open streams move into larger tensors."""
    layer = causal_conv(3, 3, 4)
    layer.place()
    store = StateStore({"network": state_specs(layer)}, torch.device("cpu"), slots=4)
    first = store.take()
    rows = store.rows("network", 1)
    rows.tensors[torch.float32].fill_(7)
    store.write(torch.tensor([first]), rows)
    slots = {store.take() for _ in range(20)}
    assert len(slots) == 20
    assert not slots & {first, SCRATCH_SLOT}
    copy = store.rows("network", 1)
    store.read(torch.tensor([first]), copy)
    assert torch.equal(copy.tensors[torch.float32], rows.tensors[torch.float32])
    store.release(first)
    assert store.take() == first


def test_states_in_place_of_a_cpu_are_freed() -> None:
    layer = WindowAttention(1, 4, 3)
    layer.place()
    store = StateStore({"network": state_specs(layer)}, torch.device("cpu"), slots=4, in_place=True)
    held = store.take()
    ended = store.take()
    store.release(ended)
    assert {*store._slot_states} == {SCRATCH_SLOT, held}
    assert store.take() == ended
    assert ended in store._slot_states
