"""Pool of CUDA graphs for tests without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from token2wav.execution.cuda_graphs import GraphPool, GraphSummary


class PoolWithoutGraphs(GraphPool):
    """Pool that captures nothing.

    Args:
        runs: calls of each function in place of its capture; 3 are as many as a capture makes, with
            the calls before it.
    """

    def __init__(self, runs: int = 0) -> None:
        self.lock, self.summary = threading.RLock(), GraphSummary()
        self.captures = 0
        self._runs = runs

    def capture(self, function: Callable[[], None], *, in_steps: bool = False) -> Any:
        self.captures += 1
        for _ in range(self._runs):
            function()
        return function
