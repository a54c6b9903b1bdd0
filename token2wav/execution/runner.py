"""Runners, which integrate batches over the ODE: eagerly, or as CUDA graphs that are captured
before the first batch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from token2wav.execution.batch import Batch, BatchSize, ChunkInput, conv_states
from token2wav.execution.step import StepFunction
from token2wav.networks.grouping import map_grouped

SWITCH = "TOKEN2WAV_CUDA_GRAPHS"  # set it to 0 to run without CUDA graphs, for debugging
# In their first calls libraries choose kernels and allocate workspaces. A capture must not record
# this work.
_WARM_UPS = 2


def graphs_enabled(device: torch.device) -> bool:
    """Returns whether a device can replay CUDA graphs and the environment has not disabled them."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


class GraphPool:
    """Memory pool and capture stream that all CUDA graphs of one model share.

    Graphs can share memory only if they run one after another. This holds because all threads
    replay them on the default stream of the device, and because a lock guards each set of buckets.
    The pool belongs to its model: torch refuses the next capture into a pool that outlived its
    graphs. There is one stream, because a library keeps a workspace (32 MiB of cuBLAS on a
    data-centre GPU) for every stream that it was ever called on.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, function: Callable[[], None]) -> CudaGraph:
        """Captures a function, which launches work on the current stream and never waits for it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            function()
        return CudaGraph(graph, function)


@dataclass(frozen=True, eq=False)
class CudaGraph:
    """Captured function. Every call reads and writes the same memory and does no work on the host.

    Attributes:
        graph: the CUDA graph.
        function: the function that was captured; this reference keeps its tensors alive.
    """

    graph: torch.cuda.CUDAGraph
    function: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


class Runner:
    """Runs batches eagerly. Every batch has tensors of its own, so threads may share a runner."""

    def __init__(self, step: StepFunction) -> None:
        self.step = step

    @torch.inference_mode()
    def run(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        """Returns the mel (bands, frames) float32 of every chunk; other chunks do not affect it."""
        if self.step.aligned:
            return map_grouped(chunks, lambda chunk: len(chunk.tables), self._run)
        return self._run(chunks) if chunks else []

    def _run(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        batch = self._batch(self._size(chunks), self._conv_states(len(chunks)))
        batch.fill(chunks)
        self.step.integrate(batch)
        return batch.take(chunks)

    def _size(self, chunks: Sequence[ChunkInput]) -> BatchSize:
        return BatchSize.of(chunks, aligned=self.step.aligned)

    def _batch(self, size: BatchSize, conv_state: torch.Tensor) -> Batch:
        return Batch(size, self.step.cache.layout, conv_state)

    def _conv_states(self, chunks: int) -> torch.Tensor:
        return conv_states(chunks, self.step.cache.layout, self.step.cache.device)


class GraphRunner(Runner):
    """Runs batches in tensors of prepared sizes, called buckets.

    A batch that is too large for the buckets is split. A batch that fits no bucket for another
    reason runs as in `Runner`.

    Args:
        step: step function. It must not wait for the device, and its host code must not depend on
            the values in tensors.
        buckets: sizes to prepare.
        graphs: pool in which the buckets are captured; None to run them eagerly, for tests.
    """

    def __init__(
        self, step: StepFunction, buckets: Sequence[BatchSize], graphs: GraphPool | None
    ) -> None:
        super().__init__(step)
        self._lock = threading.Lock()  # a bucket's tensors hold one batch at a time
        self._most_rows = max(bucket.rows for bucket in buckets)
        # Batches run one at a time, so all buckets share this large tensor: 5 MB for each chunk of
        # the public model.
        conv_state = self._conv_states(self._most_rows)
        self._buckets: dict[BatchSize, tuple[Batch, Callable[[], None]]] = {}
        # Largest first, so that all graphs reuse the memory of the first one.
        for bucket in sorted(buckets, reverse=True):
            batch = self._batch(bucket, conv_state)
            work = partial(step.integrate, batch)
            self._buckets[bucket] = batch, work if graphs is None else graphs.capture(work)

    def _run(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        with self._lock:
            return [mel for part in self._parts(chunks) for mel in self._run_together(part)]

    def _run_together(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        size = self._size(chunks)
        fitting = [bucket for bucket in self._buckets if size.fits(bucket)]
        if not fitting:
            return super()._run(chunks)
        batch, work = self._buckets[min(fitting, key=lambda bucket: bucket.cost)]
        batch.fill(chunks)
        work()
        return batch.take(chunks)

    def _parts(self, chunks: Sequence[ChunkInput]) -> list[list[ChunkInput]]:
        """Splits a batch into parts that have no more rows than the largest bucket."""
        parts: list[list[ChunkInput]] = []
        free = 0
        for chunk in chunks:
            rows = 1 if self.step.aligned else len(chunk.tables)
            if rows > free:
                parts.append([])
                free = self._most_rows
            parts[-1].append(chunk)
            free -= rows
        return parts
