"""Step functions: what evaluates the estimator on a batch at every ODE step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import Batch
from token2wav.networks.ode import OdeTables

Velocity = Callable[[int], torch.Tensor]


class StepFunction(ABC):
    """Evaluates the estimator on batches; threads may share it.

    Args:
        tables: of the ODE's schedule.
        cache: of keys and values.

    Attributes:
        aligned: whether all chunks of a batch must have room for as many blocks.
    """

    aligned = False

    def __init__(self, tables: OdeTables, cache: PagedKVCache) -> None:
        self.tables = tables
        self.cache = cache

    @abstractmethod
    def __call__(self, batch: Batch) -> Velocity:
        """Prepares what all steps of a batch share. What is returned is called for every ODE step in order.

        It gives the velocity, (branches * rows, bands, block_frames) with the conditional rows first, and stores the
        blocks' keys and values, and in the batch the chunks' `conv_state`.
        """

    @torch.inference_mode()
    def integrate(self, batch: Batch) -> None:
        """Takes a batch's state from noise to mel."""
        velocity = self(batch)
        for step in range(len(self.tables.widths)):
            batch.x.copy_(self.tables.advance(step, batch.x, velocity(step)))


class StepGraph(Protocol):
    """Executes the step on tensors that stay where they are."""

    @property
    def cache_type(self) -> torch.dtype:
        """Of keys and values that go in and come out."""

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the graph was built for inputs of these shapes."""

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """One evaluation; tensors by their names in the graph, contiguous, on the device of the engine."""


class StepFactory(Protocol):
    """Maker of the step functions of an estimator, for each way to run it."""

    def eager(self) -> StepFunction:
        """On torch."""

    def kernels(self) -> StepFunction | None:
        """On kernels that read block tables on the device, to be captured; None where they do not run."""

    def exported(self, graph: StepGraph | None) -> StepFunction:
        """On an exported graph; on torch in the same form where there is none."""
