"""Runner of the flow, which integrates batches of chunks over the ODE."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from token2wav.cache.states import StateRows, StateStore
from token2wav.execution.batch import Batch, BatchSize, ChunkInput
from token2wav.execution.buckets import BucketRunner
from token2wav.execution.graphs import GraphPool
from token2wav.execution.step import StepFunction
from token2wav.networks.grouping import map_grouped

ESTIMATOR = "estimator"  # name of the estimator in the state store


class Runner:
    """Runner of the flow, eagerly or in buckets.

    Args:
        step: step function. If there are buckets, it must not wait for the device, and its host
            code must not depend on the values in tensors.
        states: state store with the states of the estimator.
        buckets: sizes to prepare; empty to run every batch in tensors of its own, on any number of
            threads.
        graphs: pool in which the buckets are captured; None to run eagerly.
    """

    def __init__(
        self,
        step: StepFunction,
        states: StateStore,
        buckets: Sequence[BatchSize] = (),
        graphs: GraphPool | None = None,
    ) -> None:
        self.step = step
        self._states = states
        # Buckets run one at a time, so they share this large tensor: 5 MB for each chunk of the
        # public model.
        most_rows = max((bucket.rows for bucket in buckets), default=0)
        self._rows: StateRows = states.rows(ESTIMATOR, most_rows)
        self._most_rows = most_rows
        self._batches = BucketRunner(self._size_of, self._make, buckets, graphs)

    @torch.inference_mode()
    def run(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        """Returns the mel (bands, frames) float32 of every chunk; other chunks do not affect it."""
        if self.step.aligned:
            return map_grouped(chunks, lambda chunk: len(chunk.tables), self._batches.run)
        return self._batches.run(chunks)

    def _size_of(self, chunks: Sequence[ChunkInput]) -> BatchSize:
        return BatchSize.of(chunks, aligned=self.step.aligned)

    def _make(self, size: BatchSize) -> Batch:
        shared = size.rows <= self._most_rows
        rows = self._rows if shared else self._states.rows(ESTIMATOR, size.rows)
        return Batch(size, self.step.cache.layout, self._states, rows, self.step.integrate)
