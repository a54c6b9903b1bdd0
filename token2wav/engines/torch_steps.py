"""Packed batches on torch: keys and values are read from their pages, layer by layer, through tables on the device."""

from __future__ import annotations

import torch

from token2wav.engines.packed import PackedBatch
from token2wav.flow.cache import KeyValueStore, PageIndex
from token2wav.flow.dit import Attend, Convolution, DiT
from token2wav.flow.solver import OdeTables
from token2wav.flow.step import with_context


class TorchSteps:
    """See `Steps`. Nothing here waits for the device or depends on what is in the tensors.

    Args:
        batch: whose tensors are used.
        estimator: the DiT.
        tables: of the schedule.
        store: memory of all pages.
    """

    def __init__(self, batch: PackedBatch, estimator: DiT, tables: OdeTables, store: KeyValueStore) -> None:
        self._batch = batch
        self._estimator = estimator
        self._tables = tables
        self._store = store

    def __call__(self, step: int) -> torch.Tensor:
        batch = self._batch
        return self._estimator.velocity(
            batch.x,
            batch.mu,
            batch.spks,
            batch.cond,
            self._tables.modulation[step],
            (batch.cos, batch.sin),
            batch.bias,
            _PackedMemory(batch, self._store, step),
        )


class _PackedMemory:
    """The estimator's `Memory` of a packed batch at one ODE step."""

    def __init__(self, batch: PackedBatch, store: KeyValueStore, step: int) -> None:
        self._batch = batch
        self._store = store
        self._step = step

    def convolve(self, index: int, conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        """See `Memory`."""
        context = self._batch.contexts[self._step, index]
        x, after = with_context(context, x, self._batch.frames)
        context.copy_(after)
        return conv(x)

    def attend(
        self,
        layer: int,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Memory`. The chunk's own keys and values are read back from the store, as in `StepMemory`."""
        batch, rows = self._batch, k.shape[0]
        new, visible = batch.new_pages.flatten(), batch.visible_pages.flatten()
        own_k, own_v = (value.reshape(self._store.layout.branches, -1, value.shape[-1]) for value in (k, v))
        self._store.write(self._step, layer, PageIndex(len(new), new), own_k, own_v)
        seen = self._store.read(self._step, layer, PageIndex(len(visible), visible), k.dtype)
        seen_k, seen_v = (value.reshape(rows, -1, value.shape[-1]) for value in seen)
        return attend(q, seen_k, seen_v, bias)
