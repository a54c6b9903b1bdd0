"""State store: states of the streaming layers of many streams, in slots."""

from __future__ import annotations

import pytest
import torch

from token2wav.cache.states import SCRATCH_SLOT, StateStore
from token2wav.layers.combine import Chain
from token2wav.layers.streaming import causal_conv, state_specs


@pytest.fixture
def store() -> StateStore:
    network = Chain([causal_conv(3, 3, 4), causal_conv(3, 3, 2).double()])
    network.place()
    return StateStore({"network": state_specs(network)}, torch.device("cpu"), slots=4)


def test_rows_of_streams_come_back_as_they_were_written(store: StateStore) -> None:
    slots, rows = torch.tensor([store.take() for _ in range(3)]), store.rows("network", 3)
    for table in rows.tensors.values():
        table.copy_(torch.randn(table.shape))
    store.write(slots, rows)
    copy = store.rows("network", 2)
    store.read(slots[[2, 0]], copy)
    for dtype, table in copy.tensors.items():
        assert torch.equal(table, rows.tensors[dtype][[2, 0]])


def test_views_are_of_the_rows(store: StateStore) -> None:
    rows = store.rows("network", 2)
    views = rows.views
    assert [tuple(view.shape) for view in views.values()] == [(2, 3, 3), (2, 3, 1)]
    for number, view in enumerate(views.values(), 1):
        view.fill_(number)
    assert [table.unique().tolist() for table in rows.tensors.values()] == [[1.0], [2.0]]
    assert {dtype: table.shape[1] for dtype, table in rows.tensors.items()} == {
        torch.float32: 9,
        torch.float64: 3,
    }


def test_more_streams_than_slots(store: StateStore) -> None:
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
