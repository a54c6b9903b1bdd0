"""State store: the states of streaming layers for all open streams, in preallocated tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import torch

from token2wav.networks.streaming import StateSpec, Streaming

SCRATCH_SLOT = 0  # slot of no stream, which the padding rows of a batch read and write
_FIRST_SLOTS = 64

Rows = dict[torch.dtype, torch.Tensor]  # for every dtype a tensor (B, width), one row per stream


class StateStore:
    """Store of the fixed-size states of streams, one slot per stream.

    A batch reads and writes the rows of all its streams at once. A slot is not cleared for its next
    stream, because layers do not read their state in the first step of a stream.

    Several threads may use the store, each for its own streams. If all slots are taken, their
    number is doubled.

    Args:
        specs: shape and dtype of the state of every streaming layer.
        device: device of the tensors.
        slots: number of slots at the start, including the scratch slot.
    """

    def __init__(
        self, specs: Mapping[Streaming, StateSpec], device: torch.device, slots: int = _FIRST_SLOTS
    ) -> None:
        self._device = device
        self._widths: dict[torch.dtype, int] = {}
        # For every layer: dtype, shape, strides within a row, and offset of its state in the row.
        self._places: list[
            tuple[Streaming, torch.dtype, tuple[int, ...], tuple[int, ...], int]
        ] = []
        for layer, spec in specs.items():
            start = self._widths.get(spec.dtype, 0)
            strides = tuple(math.prod(spec.shape[place + 1 :]) for place in range(len(spec.shape)))
            self._places.append((layer, spec.dtype, spec.shape, strides, start))
            self._widths[spec.dtype] = start + math.prod(spec.shape)
        self._tables = self.rows(slots)
        self._free = list(range(slots - 1, SCRATCH_SLOT, -1))
        self._slots = slots
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Number of slots that belong to streams."""
        return self._slots - 1 - len(self._free)

    def rows(self, count: int) -> Rows:
        """Allocates zeroed rows for the states of `count` streams."""
        return {
            dtype: torch.zeros(count, width, dtype=dtype, device=self._device)
            for dtype, width in self._widths.items()
        }

    def views(self, rows: Rows) -> dict[Streaming, torch.Tensor]:
        """Returns a view (B, *shape) of every layer's state in `rows`, without a copy."""
        return {
            layer: rows[dtype].as_strided(
                (len(rows[dtype]), *shape), (self._widths[dtype], *strides), start
            )
            for layer, dtype, shape, strides, start in self._places
        }

    def take(self) -> int:
        """Returns a free slot for a new stream."""
        with self._lock:
            if not self._free:
                self._tables = {
                    dtype: torch.cat((table, torch.zeros_like(table)))
                    for dtype, table in self._tables.items()
                }
                self._free = list(range(2 * self._slots - 1, self._slots - 1, -1))
                self._slots *= 2
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Frees the slot of a stream."""
        with self._lock:
            self._free.append(slot)

    def read(self, slots: torch.Tensor, rows: Rows) -> None:
        """Copies the states of (B,) slots into `rows`."""
        with self._lock:
            for dtype, table in self._tables.items():
                torch.index_select(table, 0, slots, out=rows[dtype])

    def write(self, slots: torch.Tensor, rows: Rows) -> None:
        """Copies `rows` into (B,) slots."""
        with self._lock:
            for dtype, table in self._tables.items():
                table.index_copy_(0, slots, rows[dtype])
