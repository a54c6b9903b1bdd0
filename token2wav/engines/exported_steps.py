"""Packed batches on an exported step (`flow/step.py`), which some runtime executes.

Keys and values are copied from their pages into dense tensors before every step, and the new ones back into pages after
it. That costs one more reading of the past, and lets streams of any history share a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from token2wav.engines.packed import PackedBatch
from token2wav.flow.cache import KeyValueStore
from token2wav.flow.solver import OdeTables


class StepRunner(Protocol):
    """Executes the step graph on tensors that stay where they are."""

    @property
    def cache_type(self) -> torch.dtype:
        """Of keys and values that go in and come out."""

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the graph was built for inputs of these shapes."""

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """One evaluation; tensors by the names of `CachedStep`, contiguous, on the device of the engine."""


class ExportedSteps:
    """See `Steps`.

    Args:
        batch: whose tensors are used.
        runner: of the graph.
        tables: of the schedule.
        store: memory of all pages.
    """

    def __init__(self, batch: PackedBatch, runner: StepRunner, tables: OdeTables, store: KeyValueStore) -> None:
        self._batch = batch
        self._runner = runner
        self._tables = tables
        self._store = store
        layout, shape, device = store.layout, batch.shape, batch.x.device
        self._past, self._new = (
            torch.zeros(
                *(layout.layers, 2, layout.branches, shape.streams * blocks),
                *(layout.block_frames, layout.heads, layout.dim_head),
                dtype=runner.cache_type,
                device=device,
            )
            for blocks in (shape.past_blocks, shape.new_blocks)
        )
        self._inputs = {
            "x": batch.x,
            "mu": batch.mu,
            "spks": batch.spks,
            "cond": batch.cond,
            "cos": batch.cos,
            "sin": batch.sin,
            "bias": batch.bias,
            "frames": batch.frames,
            **self._by_layer("past", self._past),
        }
        self._outputs = {
            "velocity": torch.zeros_like(batch.x),
            "new_contexts": torch.zeros_like(batch.contexts[0]),
            **self._by_layer("new", self._new),
        }

    def __call__(self, step: int) -> torch.Tensor:
        batch, modulation = self._batch, self._tables.modulation[step]
        self._store.gather(step, batch.past_pages.flatten(), self._past)
        of_step = {
            "modulation": modulation.blocks[:, 0],
            "modulation_out": modulation.out[0],
            "contexts": batch.contexts[step],
        }
        self._runner.run(self._inputs | of_step, self._outputs)
        self._store.scatter(step, batch.new_pages.flatten(), self._new)
        batch.contexts[step] = self._outputs["new_contexts"]
        return self._outputs["velocity"]

    @staticmethod
    def shapes(batch: PackedBatch, store: KeyValueStore) -> dict[str, tuple[int, ...]]:
        """Those that decide whether a graph takes a batch."""
        layout = store.layout
        rows, _, frames = batch.x.shape
        past = batch.shape.past_blocks * layout.block_frames
        return {"x": (rows, batch.x.shape[1], frames), "past_key_0": (rows, past, layout.heads * layout.dim_head)}

    def _by_layer(self, prefix: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views (R, frames, inner) of (layers, 2, branches, streams * blocks, block_frames, heads, dim_head)."""
        streams = self._batch.shape.streams
        frames, inner = values.shape[3] // streams * values.shape[4], values.shape[5] * values.shape[6]
        return {
            f"{prefix}_{which}_{layer}": values[layer, kind].view(values.shape[2] * streams, frames, inner)
            for layer in range(values.shape[0])
            for kind, which in enumerate(("key", "value"))
        }
