"""Runners of batches through the ODE: eagerly, or as CUDA graphs that were captured before the
first batch came.
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

SWITCH = "TOKEN2WAV_CUDA_GRAPHS"  # 0 runs everything step by step, to debug
# libraries choose kernels and take workspaces in the first calls, which must not be recorded
_WARM_UPS = 2


def graphs_enabled(device: torch.device) -> bool:
    """Whether a device can replay graphs and nobody has turned them off."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


class GraphPool:
    """Memory pool and capture stream that all CUDA graphs of one model share.

    Sharing memory is sound as long as graphs run one after another; the engines see to that. The
    pool belongs to its
    model: one that outlived its graphs would be refused at the next capture. There is one stream,
    because a library's workspace (32 MiB of cuBLAS on a data-centre GPU) is kept for every stream
    that it was ever called on.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, function: Callable[[], None]) -> CudaGraph:
        """Records a function that launches work on the current stream, and waits for nothing."""
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
    """Recorded function, which reads and writes the same memory at every call and does nothing on
    the host.
    """

    graph: torch.cuda.CUDAGraph
    function: Callable[[], None]  # that was recorded: it keeps the memory alive

    def __call__(self) -> None:
        self.graph.replay()


class Runner:
    """Runs batches eagerly, each in tensors of its own, so that threads may share it."""

    def __init__(self, step: StepFunction) -> None:
        self.step = step

    @torch.inference_mode()
    def run(self, chunks: Sequence[ChunkInput]) -> list[torch.Tensor]:
        """Mel of every chunk, (bands, frames) float32, whatever else is in the batch."""
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
    """Runs batches in sizes that were prepared; larger ones in parts, and what no size takes as
    `Runner` does.

    Args:
        step: evaluates the estimator; nothing in it may wait for the device or depend on what is in
            tensors.
        buckets: sizes to prepare.
        graphs: where they are captured; None to run them eagerly, which is for tests.
    """

    def __init__(
        self, step: StepFunction, buckets: Sequence[BatchSize], graphs: GraphPool | None
    ) -> None:
        super().__init__(step)
        self._lock = threading.Lock()  # a bucket's tensors hold one batch at a time
        self._most_rows = max(bucket.rows for bucket in buckets)
        # Batches run one at a time, so all share what is large: 5 MB a chunk of the public model.
        conv_state = self._conv_states(self._most_rows)
        self._buckets: dict[BatchSize, tuple[Batch, Callable[[], None]]] = {}
        # so that all graphs find room in what the first one took
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
        """A batch in parts that buckets have room for, as far as that is a matter of rows."""
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
