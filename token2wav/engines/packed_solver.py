"""The loop over ODE steps for batches of one shape, on tensors that stay where they are.

Shapes that are known beforehand can be captured as CUDA graphs: then a chunk's ten steps are one launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from token2wav.engines.cuda_graphs import CudaGraph
from token2wav.engines.packed import BatchShape, PackedBatch
from token2wav.engines.work import ChunkWork
from token2wav.flow.cache import KeyValueStore
from token2wav.flow.solver import OdeTables
from token2wav.flow_config import EstimatorConfig


class Steps(Protocol):
    """Evaluates the estimator on the tensors of one batch."""

    def __call__(self, step: int) -> torch.Tensor:
        """Velocity (R, bands, N) at an ODE step; keys, values and contexts of the chunks are stored."""


class PackedChunkSolver:
    """Runs batches of any size and history, padded to a common shape.

    Args:
        steps: makes the evaluation for a batch's tensors.
        tables: of the schedule.
        store: memory of all pages.
        config: of the estimator.
        left_blocks: blocks of the past that stay visible beside the prompt's; negative for all.
        device: where tensors live.
        shapes: to prepare beforehand, and to pad batches to; other batches run in a shape of their own.
        capture: whether shapes become CUDA graphs.
    """

    def __init__(
        self,
        steps: Callable[[PackedBatch], Steps],
        tables: OdeTables,
        store: KeyValueStore,
        config: EstimatorConfig,
        left_blocks: int,
        device: torch.device,
        *,
        shapes: Sequence[BatchShape] = (),
        capture: bool = False,
    ) -> None:
        self._steps = steps
        self._tables = tables
        self._store = store
        self._config = config
        self._left_blocks = left_blocks
        self._device = device
        self._lock = threading.Lock()  # a plan's tensors hold one batch at a time
        # The largest come first, so that all graphs find room in what the first one took.
        self._plans = {shape: self._plan(shape) for shape in sorted(shapes, reverse=True)}
        self._latest: _Plan | None = None
        if capture:
            for plan in self._plans.values():
                plan.capture()

    @torch.inference_mode()
    def solve(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        """See `ChunkSolver`."""
        if not works:
            return []
        with self._lock:
            plan = self._plan_for(BatchShape.of(works))
            plan.batch.fill(works, self._left_blocks)
            plan.run()
            return plan.batch.take(works)

    def _plan_for(self, shape: BatchShape) -> _Plan:
        prepared = [other for other in self._plans if shape.fits(other)]
        if prepared:
            return self._plans[min(prepared, key=BatchShape.volume)]
        if self._latest is None or self._latest.batch.shape != shape:
            self._latest = None  # frees its tensors before the next are made
            self._latest = self._plan(shape)
        return self._latest

    @torch.inference_mode()
    def _plan(self, shape: BatchShape) -> _Plan:
        batch = PackedBatch(shape, self._config, self._store, self._device)
        return _Plan(batch, self._steps(batch), self._tables)


class _Plan:
    """The loop for one shape."""

    def __init__(self, batch: PackedBatch, steps: Steps, tables: OdeTables) -> None:
        self.batch = batch
        self._steps = steps
        self._tables = tables
        self.run: Callable[[], None] = self._run

    def capture(self) -> None:
        self.run = CudaGraph(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        """Takes the batch's state from noise to mel."""
        x, streams = self.batch.x, self.batch.shape.streams
        for step in range(len(self._tables.widths)):
            state = self._tables.advance(step, x[:streams], self._steps(step))
            x.copy_(self._tables.rows(state))
