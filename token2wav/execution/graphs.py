"""Capture of CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

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
    replay them on the default stream of the device, and because a lock guards each `BucketRunner`.
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
