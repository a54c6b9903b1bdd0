"""CUDA graphs of work on static tensors: recorded once, replayed as a single launch."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

SWITCH = "TOKEN2WAV_CUDA_GRAPHS"  # 0 runs everything step by step, to debug
_WARM_UPS = 2  # libraries choose kernels and take workspaces in the first calls, which must not be recorded


def graphs_enabled(device: torch.device) -> bool:
    """Whether a device can replay graphs and nobody has turned them off."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


class GraphPool:
    """Memory pool and capture stream that all CUDA graphs of one model share.

    Sharing memory is sound as long as graphs run one after another; the engines see to that. The pool belongs to its
    model: one that outlived its graphs would be refused at the next capture. There is one stream, because a library's
    workspace (32 MiB of cuBLAS on a data-centre GPU) is kept for every stream that it was ever called on.

    Args:
        device: that graphs are captured on.
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


class CudaGraph:
    """A recorded function. It reads and writes the same memory at every call and does nothing on the host.

    Args:
        graph: the recording.
        function: that was recorded; it keeps the memory alive.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        self._graph = graph
        self._function = function

    def __call__(self) -> None:
        self._graph.replay()
