"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from token2wav.errors import BackendError
from token2wav.execution.cuda_facts import nodes_in_capture, uploaded

SWITCH = "TOKEN2WAV_CUDA_GRAPHS"  # set it to 0 to run without CUDA graphs, for debugging
# Calls of a function before its capture. In these first calls, libraries choose kernels and
# allocate workspaces. The capture must not record this work.
_WARM_UPS = 2


def graphs_enabled(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


class CaptureError(Exception):
    """A function runs, but cannot be captured as a CUDA graph."""


@dataclass
class GraphSummary:
    """Summary of a model's CUDA graphs, for reports.

    Attributes:
        nodes: nodes in all graphs; None without cuda-python.
        memory: bytes of GPU memory that the captures took.
        seconds: time that the captures took, with the runs before them, in which the Triton
            language compiles kernels.
    """

    graphs: int = 0
    nodes: int | None = None
    memory: int = 0
    seconds: float = 0.0


class GraphPool:
    """Memory pool and CUDA stream for the capture of one model's CUDA graphs.

    Graphs can share memory only if they run one after another. This holds because all threads
    replay them on the default stream of the device, and because a lock guards each `BucketRunner`.
    Every model has a pool of its own, because torch refuses a capture into a pool whose graphs were
    all freed. All captures use one CUDA stream, because a library keeps a workspace for every CUDA
    stream that it was ever called on. The workspace of cuBLAS has 32 MiB on a data-centre GPU.

    After a capture that failed, the allocator of torch 2.11 and older still records allocations for
    the pool, and refuses every later capture into it. So the pool ends the recording, and later
    captures use another pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        # Graphs whose capture failed. Their memory pools may only be freed with the model.
        self._failed: list[torch.cuda.CUDAGraph] = []
        self.summary = GraphSummary()

    def capture(self, function: Callable[[], None]) -> CudaGraph:
        """Captures a function as a CUDA graph.

        The function runs before the capture. The graph is on the GPU when this method returns, so
        that the first replay is as fast as later ones: cuda-python uploads the graph, or it is
        replayed once. All these runs compute with the present content of the tensors.

        Args:
            function: launches work on the current CUDA stream and never waits for that work.

        Raises:
            CaptureError: the capture failed, although the function runs without a capture.
        """
        began = time.monotonic()
        torch.cuda.empty_cache()  # else the capture itself would free this memory
        free, _ = torch.cuda.mem_get_info(self._device)
        self._stream.wait_stream(torch.cuda.current_stream())
        # This context also selects the earlier stream again if a capture fails.
        with torch.cuda.stream(self._stream), _convolutions_timed():
            for _ in range(_WARM_UPS):
                function()
            torch.cuda.synchronize()
            graph, nodes = self._record(function)
        if not uploaded(graph, torch.cuda.current_stream().cuda_stream):
            graph.replay()
        torch.cuda.synchronize()
        summary = self.summary
        summary.graphs += 1
        if nodes is not None:
            summary.nodes = (summary.nodes or 0) + nodes
        summary.memory += free - torch.cuda.mem_get_info(self._device)[0]
        summary.seconds += time.monotonic() - began
        return CudaGraph(graph, function)

    def _record(self, function: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, int | None]:
        graph = torch.cuda.CUDAGraph()
        try:
            # By default a capture fails if any other thread of the process allocates memory or
            # waits for the GPU, as a second model or a server's metrics may.
            with (
                _garbage_kept(),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                function()
                nodes = nodes_in_capture(self._stream.cuda_stream)
        except (BackendError, RuntimeError) as error:
            self._leave_pool(graph)
            torch.cuda.synchronize()  # fails if the GPU is lost, which is another error
            raise CaptureError(" ".join(str(error).split())[:300]) from error
        return graph, nodes

    def _leave_pool(self, graph: torch.cuda.CUDAGraph) -> None:
        self._failed.append(graph)
        # Missing in builds of torch without CUDA.
        end_recording = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end_recording is not None:
            with suppress(RuntimeError):  # the allocator has ended the recording already
                end_recording(self._device.index or 0, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _convolutions_timed() -> Iterator[None]:
    """Lets cuDNN choose the algorithm of each convolution by measurement, in the first call of a
    function. The capture then records the fastest one.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collects no garbage: graphs of a model that is gone may be garbage, and to free a graph
    within a capture ends the capture with an error.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, eq=False)
class CudaGraph:
    """Captured function. Every call reads and writes the same memory, and runs no Python code of
    the function.

    Attributes:
        function: function that was captured; this reference keeps its tensors alive.
    """

    graph: torch.cuda.CUDAGraph
    function: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()
