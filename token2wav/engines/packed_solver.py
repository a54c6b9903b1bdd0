"""The loop over ODE steps for batches of one shape, on tensors that stay where they are.

Shapes that are known beforehand can be captured as CUDA graphs: then a chunk's ten steps are one launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from token2wav.engines.cuda_graphs import CudaGraph
from token2wav.engines.packed import Batch, BatchShape
from token2wav.engines.work import ChunkWork
from token2wav.flow.solver import OdeTables
from token2wav.groups import in_groups


class Steps(Protocol):
    """Evaluates the estimator on the tensors of one batch."""

    def __call__(self, step: int) -> torch.Tensor:
        """Velocity (R, bands, N) at an ODE step; keys, values and contexts of the chunks are stored."""


class PackedChunkSolver:
    """Runs batches of any size and history, padded to a common shape.

    Args:
        prepare: makes the tensors of a shape, and the evaluation on them.
        tables: of the schedule.
        shapes: to prepare beforehand, and to pad batches to; other batches run in a shape of their own.
        capture: whether shapes become CUDA graphs.
        apart: whether chunks of different lengths run one length after the other instead of padded to the longest.
    """

    def __init__(
        self,
        prepare: Callable[[BatchShape], tuple[Batch, Steps]],
        tables: OdeTables,
        *,
        shapes: Sequence[BatchShape] = (),
        capture: bool = False,
        apart: bool = False,
    ) -> None:
        self._prepare = prepare
        self._tables = tables
        self._apart = apart
        self._lock = threading.Lock()  # a plan's tensors hold one batch at a time
        # The largest come first, so that all graphs find room in what the first one took.
        self._plans = {shape: self._plan(shape) for shape in sorted(shapes, reverse=True)}
        self._most_streams = max((shape.streams for shape in shapes), default=None)
        self._latest: _Plan | None = None
        if capture:
            for plan in self._plans.values():
                plan.capture()

    @torch.inference_mode()
    def solve(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        """See `ChunkSolver`."""
        with self._lock:
            return in_groups(works, lambda work: self._apart and len(work.new), self._solve)

    def _solve(self, works: list[ChunkWork]) -> list[torch.Tensor]:
        mels = []
        for first in range(0, len(works), self._most_streams or len(works)):
            batch = works[first:][: self._most_streams]
            plan = self._plan_for(BatchShape.of(batch))
            plan.batch.fill(batch)
            plan.run()
            mels += plan.batch.take(batch)
        return mels

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
        return _Plan(*self._prepare(shape), self._tables)


class _Plan:
    """The loop for one shape."""

    def __init__(self, batch: Batch, steps: Steps, tables: OdeTables) -> None:
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
