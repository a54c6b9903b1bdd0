"""Capture of CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

SWITCH = "TOKEN2WAV_CUDA_GRAPHS"  # set it to 0 to run without CUDA graphs, for debugging
# Number of calls of a function before its capture. In the first calls of a function, libraries
# choose kernels and allocate workspaces. The capture must not record this work.
_WARM_UPS = 2


def graphs_enabled(device: torch.device) -> bool:
    """Returns whether a device can replay CUDA graphs and the environment has not disabled them."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


class GraphPool:
    """Memory pool and CUDA stream for the capture of all CUDA graphs of one model.

    Graphs can share memory only if they run one after another. This holds because all threads
    replay them on the default stream of the device, and because a lock guards each `BucketRunner`.
    Every model has a pool of its own, because torch refuses a capture into a pool whose graphs were
    all freed. All captures use one CUDA stream, because a library keeps a workspace for every CUDA
    stream that it was ever called on. The workspace of cuBLAS has 32 MiB on a data-centre GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, function: Callable[[], None]) -> CudaGraph:
        """Captures a function as a CUDA graph.

        Args:
            function: launches work on the current CUDA stream and never waits for that work.
        """
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
    """Captured function. Every call reads and writes the same memory, and runs no Python code of
    the function.

    Attributes:
        graph: the CUDA graph.
        function: the function that was captured; this reference keeps its tensors alive.
    """

    graph: torch.cuda.CUDAGraph
    function: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()
