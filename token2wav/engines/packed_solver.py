"""The loop over ODE steps for batches of one shape, on tensors that stay where they are.

Shapes that are known beforehand can be captured as CUDA graphs: then a chunk's ten steps are one launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from token2wav.engines.cuda_graphs import GraphPool
from token2wav.engines.packed import Batch, BatchShape
from token2wav.engines.plans import Plan, Plans
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
        graphs: where shapes are captured as CUDA graphs; None for none.
        apart: whether chunks of different lengths run one length after the other instead of padded to the longest.
    """

    def __init__(
        self,
        prepare: Callable[[BatchShape], tuple[Batch, Steps]],
        tables: OdeTables,
        *,
        shapes: Sequence[BatchShape] = (),
        graphs: GraphPool | None = None,
        apart: bool = False,
    ) -> None:
        self._prepare = prepare
        self._tables = tables
        self._apart = apart
        self._lock = threading.Lock()  # a plan's tensors hold one batch at a time
        self._plans = Plans(self._plan, shapes, graphs)

    @torch.inference_mode()
    def solve(self, works: Sequence[ChunkWork]) -> list[torch.Tensor]:
        """See `ChunkSolver`."""
        with self._lock:
            return in_groups(works, lambda work: self._apart and len(work.new), self._solve)

    def _solve(self, works: list[ChunkWork]) -> list[torch.Tensor]:
        mels = []
        for part in self._plans.parts(works):
            plan = self._plans.of(BatchShape.of(part))
            plan.batch.fill(part)
            plan.run()
            mels += plan.batch.take(part)
        return mels

    def _plan(self, shape: BatchShape) -> Plan[Batch]:
        batch, steps = self._prepare(shape)
        return Plan(batch, partial(integrate, batch, steps, self._tables))


@torch.inference_mode()
def integrate(batch: Batch, steps: Steps, tables: OdeTables) -> None:
    """Takes a batch's state from noise to mel."""
    x, streams = batch.x, batch.shape.streams
    for step in range(len(tables.widths)):
        state = tables.advance(step, x[:streams], steps(step))
        x.copy_(tables.rows(state))
