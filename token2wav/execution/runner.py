"""Runner of the flow, which integrates batches of chunks from noise to mel."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch

from token2wav.cache.states import StateStore
from token2wav.execution.batch import Batch, BatchSize, ChunkInput
from token2wav.execution.buckets import BucketRunner, map_grouped
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.execution.step import StepFunction
from token2wav.execution.step_boundary import in_interruption

log = logging.getLogger(__name__)

ESTIMATOR = "estimator"  # name of the estimator in the state store


class FlowRunner:
    """Runner of the flow, which takes batches of chunks through all ODE steps: eagerly, or in
    buckets (`BucketRunner`).

    Args:
        step: step function, which evaluates the estimator on a batch. With buckets, the step
            function must not wait for the device, and its host code must not depend on the values
            in tensors.
    """

    def __init__(
        self,
        step: StepFunction,
        states: StateStore,
        buckets: Sequence[BatchSize] = (),
        graphs: GraphPool | None = None,
        in_steps: Collection[BatchSize] = (),
    ) -> None:
        self.step = step
        self._states = states
        self._in_steps = in_steps
        # Buckets run one at a time, so they share one set of rows. A row of the public model has
        # 5 MB. Buckets that can be interrupted share another set.
        rows_in_steps = max((bucket.rows for bucket in in_steps), default=0)
        whole = [bucket.rows for bucket in buckets if bucket not in in_steps]
        self._most_rows = max(whole, default=0)
        self._rows = states.rows(ESTIMATOR, self._most_rows)
        self._rows_in_steps = states.rows(ESTIMATOR, rows_in_steps)
        self._most_past = max((bucket.past_pages for bucket in buckets), default=None)
        self._warned = False
        self._batches = BucketRunner(self._size_of, self._make, buckets, graphs, in_steps)

    @torch.inference_mode()
    def run(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        """Computes the mel (bands, frames) of every chunk, in float32."""
        if self.step.aligned:
            return map_grouped(chunks, lambda chunk: len(chunk.place.tables), self._batches.run)
        return self._batches.run(chunks)

    def _size_of(self, chunks: Sequence[ChunkInput]) -> BatchSize:
        return BatchSize.of([chunk.place for chunk in chunks], aligned=self.step.aligned)

    def _make(self, size: BatchSize) -> Batch:
        self._warn_of_long_past(size)
        # The rows of buckets in steps hold the batch that is interrupted.
        if size in self._in_steps and not in_interruption():
            rows = self._rows_in_steps
        elif size.rows <= self._most_rows:
            rows = self._rows
        else:
            rows = self._states.rows(ESTIMATOR, size.rows)
        return Batch(size, self.step.cache.layout, self._states, rows, self.step.integrate)

    def _warn_of_long_past(self, size: BatchSize) -> None:
        if self._warned or self._most_past is None or size.past_pages <= self._most_past:
            return
        self._warned = True
        log.warning(
            "a stream attends to %d past blocks, and batches are prepared for %d: its chunks run "
            "without CUDA graphs, about half as fast; bound the past with stream.left_blocks",
            *(size.past_pages, self._most_past),
        )
