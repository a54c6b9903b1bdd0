"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch

from token2wav.errors import BackendError, one_line
from token2wav.execution.cuda_facts import nodes_in_capture, uploaded
from token2wav.execution.step_boundary import at_boundaries, step_boundary

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
    """Summary of a model's CUDA graphs, for reports."""

    graphs: int = 0
    nodes: int | None = None  # in all graphs; None without cuda-python
    memory: int = 0  # bytes of GPU memory that the captures took
    # Time of the captures and the runs before them, in which the Triton language compiles kernels.
    seconds: float = 0.0


class GraphPool:
    """Memory pool and CUDA stream for the capture of one model's CUDA graphs.

    Graphs can share memory only if they run one after another. This holds because all threads
    replay them on the default stream of the device, and because each `BucketRunner` of the pool
    holds `lock` while it runs a batch.

    A function that is captured in steps keeps tensors in the shared memory from step to step. A
    batch of another runner, with another number of ODE steps, would overwrite them, so all runners
    share the lock of the pool. Other graphs may run between the steps, so functions that are
    captured in steps have a second memory pool.

    Every model has a pool of its own, because torch refuses a capture into a pool whose graphs were
    all freed. All captures use one CUDA stream, because a library keeps a workspace for every CUDA
    stream that it was ever called on. The workspace of cuBLAS has 32 MiB on a data-centre GPU.

    After a capture that failed, the allocator of torch 2.11 and older still records allocations for
    the pool, and refuses every later capture into it. So the pool ends the recording, and later
    captures use another pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lock = threading.RLock()  # held by the thread that replays graphs of the pool
        # Memory pools, by whether functions are captured in steps.
        self._handles = {in_steps: torch.cuda.graph_pool_handle() for in_steps in (False, True)}
        self._stream = torch.cuda.Stream(device)
        # Graphs whose capture failed. Their memory pools may only be freed with the model.
        self._failed: list[torch.cuda.CUDAGraph] = []
        self.summary = GraphSummary()

    def capture(self, function: Callable[[], None], *, in_steps: bool = False) -> CudaGraph:
        """Captures a function as a CUDA graph.

        The function runs before the capture. The graph is on the GPU when this method returns, so
        that the first replay is as fast as later ones: cuda-python uploads the graph, or it is
        replayed once. All these runs compute with the present content of the tensors.

        Args:
            function: launches work on the current CUDA stream and never waits for that work.
            in_steps: whether each part between two step boundaries becomes a graph of its own. A
                function that is captured in steps must not run between the steps of another one.

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
            graphs, nodes = self._record(function, in_steps=in_steps)
        stream = torch.cuda.current_stream().cuda_stream
        if not all(uploaded(graph, stream) for graph in graphs):
            for graph in graphs:
                graph.replay()
        torch.cuda.synchronize()
        summary = self.summary
        summary.graphs += 1
        if nodes is not None:
            summary.nodes = (summary.nodes or 0) + nodes
        summary.memory += free - torch.cuda.mem_get_info(self._device)[0]
        summary.seconds += time.monotonic() - began
        return CudaGraph(graphs, function)

    def _record(
        self, function: Callable[[], None], *, in_steps: bool
    ) -> tuple[list[torch.cuda.CUDAGraph], int | None]:
        graphs: list[torch.cuda.CUDAGraph] = []
        nodes: list[int | None] = []
        try:
            with _garbage_kept(), ExitStack() as recording:

                def end_graph() -> None:
                    nodes.append(nodes_in_capture(self._stream.cuda_stream))
                    recording.close()

                def begin_graph() -> None:
                    graphs.append(torch.cuda.CUDAGraph())
                    # By default a capture fails if any other thread of the process allocates memory
                    # or waits for the GPU, as a second model or a server's metrics may.
                    capture = torch.cuda.graph(
                        graphs[-1],
                        pool=self._handles[in_steps],
                        stream=self._stream,
                        capture_error_mode="thread_local",
                    )
                    recording.enter_context(capture)

                def next_graph() -> None:
                    end_graph()
                    begin_graph()

                begin_graph()
                with at_boundaries(next_graph if in_steps else None):
                    function()
                end_graph()
        except (BackendError, RuntimeError) as error:
            self._failed += graphs
            self._leave_pool(in_steps=in_steps)
            torch.cuda.synchronize()  # fails if the GPU is lost, which is another error
            raise CaptureError(one_line(error)[:300]) from error
        counted = [count for count in nodes if count is not None]
        return graphs, sum(counted) if len(counted) == len(nodes) else None

    def _leave_pool(self, *, in_steps: bool) -> None:
        # Missing in builds of torch without CUDA.
        end_recording = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end_recording is not None:
            with suppress(RuntimeError):  # the allocator has ended the recording already
                end_recording(self._device.index or 0, self._handles[in_steps])
        self._handles[in_steps] = torch.cuda.graph_pool_handle()


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
    the function, except for its step boundaries.
    """

    graphs: Sequence[torch.cuda.CUDAGraph]  # in order; several if captured in steps
    function: Callable[[], None]  # keeps its tensors alive

    def __call__(self) -> None:
        first, *later = self.graphs
        first.replay()
        for graph in later:
            step_boundary()
            graph.replay()
