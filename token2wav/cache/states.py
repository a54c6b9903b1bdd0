"""State store: preallocated tensors with the fixed-size states of layers for all open streams."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from token2wav.layers.streaming import StatesInPlace, StateSpec

# Slot that belongs to no stream. The padding rows of a batch read it and write to it. A state that
# must not be kept, such as the state after a provisional chunk, is written to it.
SCRATCH_SLOT = 0
_GROWTH = 64  # slots that are added when all are taken
_ALIGNMENT = 16  # elements; states in place begin at a multiple, as kernels expect

# Specs of the states of a network, by the layers that declare them.
Specs = Mapping[nn.Module, StateSpec]


@dataclass(frozen=True, eq=False)
class StateRows:
    """States of one network for the streams of a batch, one row per stream.

    Attributes:
        tensors: (B, width) states of all layers with one dtype, by dtype.
        views: (B, *shape) state of every layer, as a view of `tensors`. The states that a store
            keeps in place are missing.
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
    the store, and copies them back after a step. A slot that is taken has arbitrary values, so a
    new stream must overwrite or clear them.

    With `in_place`, states of layers with `Streaming.state_in_place` stay where they are, and a
    step changes them without a copy. A layer without `state_kernel` gets the tensor of each stream.
    The addresses of a CUDA graph are fixed, so a kernel in it reads the places of the states from a
    tensor (`StatesInPlace`).

    Several threads may use the store, each for its own streams. If all slots are taken, the store
    grows: it copies its tensors into larger ones, and for a moment needs memory for both.

    Args:
        slots: slots at the start, including the scratch slot.
        in_place: whether states that can stay in place do so.
    """

    def __init__(
        self,
        networks: Mapping[str, Specs],
        device: torch.device,
        slots: int = _GROWTH,
        *,
        in_place: bool = False,
    ) -> None:
        self._device = device
        self._in_place: dict[nn.Module, StateSpec] = {
            layer: spec
            for specs in networks.values()
            for layer, spec in specs.items()
            if in_place and getattr(layer, "state_in_place", False)
        }
        self._layout_in_place = _Layout(self._in_place)
        self._layouts = {
            name: _Layout(
                {layer: spec for layer, spec in specs.items() if layer not in self._in_place}
            )
            for name, specs in networks.items()
        }
        assert len(self._layout_in_place.widths) <= 1, "all states in place must have one dtype"
        # States in place, by slot. On a CPU they are allocated when a stream takes the slot.
        self._slot_states: dict[int, dict[nn.Module, torch.Tensor]] = {}
        self._allocate(range(1 if device.type == "cpu" else slots))
        self._tables = {name: self._zeros(name, slots) for name in networks}
        self._free = list(range(slots - 1, SCRATCH_SLOT, -1))
        self._slots = slots
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._slots - 1 - len(self._free)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states of one stream."""
        in_place = sum(state.nbytes for state in self._slot_states[SCRATCH_SLOT].values())
        return sum(table[0].nbytes for table in self._all_tables()) + in_place

    def rows(self, network: str, count: int) -> StateRows:
        """Allocates zeroed rows for the states of `count` streams."""
        tensors = self._zeros(network, count)
        return StateRows(network, tensors, self._layouts[network].views(tensors))

    def take(self) -> int:
        with self._lock:
            if not self._free:
                self._grow()
            if self._free[-1] not in self._slot_states:
                self._allocate(self._free[-1:])
            return self._free.pop()

    def release(self, slot: int) -> None:
        with self._lock:
            if self._device.type == "cpu":  # on a GPU, new memory takes long
                del self._slot_states[slot]
            self._free.append(slot)

    def clear(self, slot: int) -> None:
        with self._lock:
            for table in self._all_tables():
                table[slot].zero_()
            for state in self._slot_states[slot].values():
                state.zero_()

    def copy(self, source: int, target: int) -> None:
        with self._lock:
            for table in self._all_tables():
                table[target].copy_(table[source])
            for layer, state in self._slot_states[source].items():
                self._slot_states[target][layer].copy_(state)

    def read(self, slots: torch.Tensor, rows: StateRows) -> None:
        """Copies the states in slots (B,) into `rows`."""
        with self._lock:
            for dtype, table in self._tables[rows.network].items():
                torch.index_select(table, 0, slots, out=rows.tensors[dtype])

    def offsets(self, slots: Sequence[int]) -> list[int]:
        """Returns the distances of the states in place from those of the scratch slot, in elements.
        They are the same for all layers, because the states of a slot lie in one tensor.
        """
        if not self._in_place:
            return [0] * len(slots)
        layer = next(iter(self._in_place))
        with self._lock:
            states = [self._slot_states[slot][layer] for slot in (SCRATCH_SLOT, *slots)]
        scratch, *places = [state.data_ptr() // state.element_size() for state in states]
        return [place - scratch for place in places]

    def states_of(
        self, slots: Sequence[int], offsets: torch.Tensor, rows: StateRows
    ) -> Mapping[nn.Module, Any]:
        """Returns the state of each layer for a batch: a view of the rows, or the states in the
        given slots, if they stay in place.

        Args:
            offsets: (B,) tensor on the device for the `offsets` of slots, which a kernel reads.
        """
        if not self._in_place:
            return rows.views
        with self._lock:
            scratch, *slot_states = [self._slot_states[slot] for slot in (SCRATCH_SLOT, *slots)]
        return {
            **rows.views,
            **{
                layer: StatesInPlace(scratch[layer], offsets)
                if getattr(layer, "state_kernel", None)
                else [states[layer] for states in slot_states]
                for layer in self._in_place
            },
        }

    def write(self, slots: torch.Tensor, rows: StateRows) -> None:
        """Copies `rows` into slots (B,). No slot may occur twice, except the scratch slot."""
        with self._lock:
            for dtype, table in self._tables[rows.network].items():
                table.index_copy_(0, slots, rows.tensors[dtype])

    def _all_tables(self) -> list[torch.Tensor]:
        return [table for tables in self._tables.values() for table in tables.values()]

    def _allocate(self, slots: Sequence[int]) -> None:
        """Allocates the states in place of slots, together, because each allocation of a GPU may be
        rounded up by megabytes. Layers write their states before they read them.
        """
        tensors = {
            dtype: torch.empty(len(slots), _aligned(width), dtype=dtype, device=self._device)
            for dtype, width in self._layout_in_place.widths.items()
        }
        views = self._layout_in_place.views(tensors)
        for index, slot in enumerate(slots):
            self._slot_states[slot] = {layer: view[index] for layer, view in views.items()}

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


def _aligned(width: int) -> int:
    return -(-width // _ALIGNMENT) * _ALIGNMENT


class _Layout:
    """Layout of a row: the place of the state of every layer of one network."""

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
            views[layer] = rows.as_strided((len(rows), *shape), (rows.stride(0), *strides), start)
        return views
