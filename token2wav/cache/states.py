"""State store: what streaming layers keep of all open streams, as rows of preallocated tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import torch

from token2wav.networks.streaming import StateSpec, Streaming

SCRATCH_SLOT = 0  # belongs to no stream: rows of a batch that stand for none read and write there
_FIRST_SLOTS = 64

Rows = dict[torch.dtype, torch.Tensor]  # (B, width) of every type of number


class StateStore:
    """Fixed-size states of streams, one slot for each. A batch reads and writes all its streams'
    rows at once.

    A slot is not cleared for its next owner, as nothing is read at the first piece of a stream. It
    may be used from several threads, by each for streams of its own. There are more slots when they
    are needed.
    """

    def __init__(
        self, specs: Mapping[Streaming, StateSpec], device: torch.device, slots: int = _FIRST_SLOTS
    ) -> None:
        self._device = device
        self._widths: dict[torch.dtype, int] = {}
        # Of every layer: type, shape, strides within a row, and where in the row it begins.
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
        """Slots that are taken."""
        return self._slots - 1 - len(self._free)

    def rows(self, count: int) -> Rows:
        """Room for the states of so many streams."""
        return {
            dtype: torch.zeros(count, width, dtype=dtype, device=self._device)
            for dtype, width in self._widths.items()
        }

    def views(self, rows: Rows) -> dict[Streaming, torch.Tensor]:
        """Views of every layer's state, (B, *shape), in rows of streams."""
        return {
            layer: rows[dtype].as_strided(
                (len(rows[dtype]), *shape), (self._widths[dtype], *strides), start
            )
            for layer, dtype, shape, strides, start in self._places
        }

    def take(self) -> int:
        """A slot for a new stream."""
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
        """Gives a stream's slot back."""
        with self._lock:
            self._free.append(slot)

    def read(self, slots: torch.Tensor, rows: Rows) -> None:
        """Copies the states of streams, (B,) slots, into rows."""
        with self._lock:
            for dtype, table in self._tables.items():
                torch.index_select(table, 0, slots, out=rows[dtype])

    def write(self, slots: torch.Tensor, rows: Rows) -> None:
        """Copies rows back."""
        with self._lock:
            for dtype, table in self._tables.items():
                table.index_copy_(0, slots, rows[dtype])
