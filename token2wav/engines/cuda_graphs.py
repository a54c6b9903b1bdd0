"""Work on static CUDA tensors, recorded once and replayed as a single launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

SWITCH = "TOKEN2WAV_CUDA_GRAPHS"  # 0 runs everything step by step, to debug
_WARM_UPS = 2  # libraries choose kernels and take workspaces in the first calls, which must not be recorded

_pool: Any = None


def graphs_enabled(device: torch.device) -> bool:
    """Whether a device can replay graphs and nobody has turned them off."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


class CudaGraph:
    """A recorded function. It reads and writes the same memory at every call and does nothing on the host.

    All graphs share one memory pool, which is sound as long as they run one after another; the engines see to that.

    Args:
        function: launches work on the current stream and waits for nothing.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        global _pool
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=_pool):
            function()
        _pool = self._graph.pool()
        self._function = function  # keeps the memory alive that was recorded

    def __call__(self) -> None:
        self._graph.replay()
