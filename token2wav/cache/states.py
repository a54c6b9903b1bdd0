"""State store: preallocated tensors with the fixed-size states of layers for all open streams."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from token2wav.networks.streaming import StateSpec

# Slot that belongs to no stream. The padding rows of a batch read it and write to it. A state that
# must not be kept, such as the state after a provisional chunk, is written to it.
SCRATCH_SLOT = 0
_GROWTH = 64  # number of slots that are added when all are taken

# Specs of the states of a network, by the layers that declare them.
Specs = Mapping[nn.Module, StateSpec]


@dataclass(frozen=True, eq=False)
class StateRows:
    """States of one network for the streams of a batch, one row per stream.

    Attributes:
        network: name of the network in the store.
        tensors: (B, width) states of all layers with one dtype, by dtype.
        views: (B, *shape) state of every layer, as a view of `tensors`.
    """

    network: str
    tensors: Mapping[torch.dtype, torch.Tensor]
    views: Mapping[nn.Module, torch.Tensor]

    def first(self, count: int) -> StateRows:
        """Returns the first `count` rows, without a copy."""
        return StateRows(
            self.network,
            {dtype: rows[:count] for dtype, rows in self.tensors.items()},
            {layer: view[:count] for layer, view in self.views.items()},
        )


class StateStore:
    """Store of the fixed-size states of streams. Each stream has one slot.

    A slot is one row of the tensors of every network. A batch copies the rows of its streams out of
    the store, and copies them back after a step. A slot that was released keeps its values, so a
    new stream must overwrite or clear them.

    Several threads may use the store, each for its own streams. If all slots are taken, the store
    grows: it copies its tensors into larger ones, and for a moment needs memory for both.

    Args:
        networks: specs of the states of each network, by the name of the network.
        device: device of the tensors.
        slots: number of slots at the start, including the scratch slot.
    """

    def __init__(
        self, networks: Mapping[str, Specs], device: torch.device, slots: int = _GROWTH
    ) -> None:
        self._device = device
        self._layouts = {name: _Layout(specs) for name, specs in networks.items()}
        self._tables = {name: self._zeros(name, slots) for name in networks}
        self._free = list(range(slots - 1, SCRATCH_SLOT, -1))
        self._slots = slots
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Number of slots that belong to streams."""
        return self._slots - 1 - len(self._free)

    @property
    def slot_bytes(self) -> int:
        """Number of bytes of the states of one stream."""
        return sum(table[0].nbytes for table in self._all_tables())

    def rows(self, network: str, count: int) -> StateRows:
        """Allocates zeroed rows for the states of `count` streams."""
        tensors = self._zeros(network, count)
        return StateRows(network, tensors, self._layouts[network].views(tensors))

    def take(self) -> int:
        """Returns a free slot for a new stream."""
        with self._lock:
            if not self._free:
                self._grow()
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Frees the slot of a stream."""
        with self._lock:
            self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Sets all states of a slot to zero."""
        with self._lock:
            for table in self._all_tables():
                table[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copies all states from one slot to another."""
        with self._lock:
            for table in self._all_tables():
                table[target].copy_(table[source])

    def read(self, slots: torch.Tensor, rows: StateRows) -> None:
        """Copies the states in slots (B,) into `rows`."""
        with self._lock:
            for dtype, table in self._tables[rows.network].items():
                torch.index_select(table, 0, slots, out=rows.tensors[dtype])

    def write(self, slots: torch.Tensor, rows: StateRows) -> None:
        """Copies `rows` into slots (B,). No slot may occur twice, except the scratch slot."""
        with self._lock:
            for dtype, table in self._tables[rows.network].items():
                table.index_copy_(0, slots, rows.tensors[dtype])

    def _all_tables(self) -> list[torch.Tensor]:
        return [table for tables in self._tables.values() for table in tables.values()]

    def _zeros(self, network: str, count: int) -> dict[torch.dtype, torch.Tensor]:
        return {
            dtype: torch.zeros(count, width, dtype=dtype, device=self._device)
            for dtype, width in self._layouts[network].widths.items()
        }

    def _grow(self) -> None:
        """Adds slots. On a CPU, slots that were never used take no memory."""
        slots = self._slots + _GROWTH
        for name, tables in self._tables.items():
            larger = self._zeros(name, slots)
            for dtype, table in tables.items():
                larger[dtype][: self._slots] = table
            self._tables[name] = larger
        self._free = list(range(slots - 1, self._slots - 1, -1))
        self._slots = slots


class _Layout:
    """Layout of a row: the place of the state of every layer of one network.

    Attributes:
        widths: number of values in a row, by dtype.
    """

    def __init__(self, specs: Specs) -> None:
        self.widths: dict[torch.dtype, int] = {}
        self._places: list[tuple[nn.Module, StateSpec, int]] = []  # layer, spec, offset in the row
        for layer, spec in specs.items():
            start = self.widths.get(spec.dtype, 0)
            self._places.append((layer, spec, start))
            self.widths[spec.dtype] = start + math.prod(spec.shape)

    def views(self, tensors: Mapping[torch.dtype, torch.Tensor]) -> dict[nn.Module, torch.Tensor]:
        """Returns the state (B, *shape) of every layer, as a view of tensors (B, width)."""
        views = {}
        for layer, (_, shape, dtype), start in self._places:
            rows = tensors[dtype]
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            views[layer] = rows.as_strided(
                (len(rows), *shape), (self.widths[dtype], *strides), start
            )
        return views
