"""Step functions: what evaluates the estimator on a batch at every ODE step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import Batch
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.ode import OdeTables

Velocity = Callable[[int], torch.Tensor]


class StepFunction(ABC):
    """Evaluates the estimator on batches; threads may share it.

    Args:
        flow: on the device of the cache; the estimator's weights are used, not copied.
        tables: of the ODE's schedule.
        cache: of keys and values.

    Attributes:
        aligned: whether all chunks of a batch must have room for as many blocks.
    """

    aligned = False

    def __init__(self, flow: Flow, tables: OdeTables, cache: PagedKVCache) -> None:
        self.estimator = flow.estimator
        self.config = flow.config.estimator
        self.tables = tables
        self.cache = cache

    @abstractmethod
    def __call__(self, batch: Batch) -> Velocity:
        """Prepares what all steps of a batch share. What is returned is called for every ODE step in order.

        It gives the velocity, (branches * rows, bands, block_frames) with the conditional rows first, and stores the
        blocks' keys and values, and in the batch the chunks' `conv_state`.
        """

    def of_conditions(self, batch: Batch) -> torch.Tensor:
        """Share of the conditions in the input projection of all steps, (branches, rows, block_frames, dim)."""
        embed = self.estimator.input_embed
        conditional = embed.of_conditions(batch.cond.transpose(1, 2), batch.mu.transpose(1, 2), batch.speakers)
        given = conditional.new_empty(self.cache.layout.branches, *conditional.shape)
        given[0] = conditional
        given[1:] = embed.proj.bias  # without conditions only the bias is left
        return given

    @torch.inference_mode()
    def integrate(self, batch: Batch) -> None:
        """Takes a batch's state from noise to mel."""
        velocity = self(batch)
        for step in range(len(self.tables.widths)):
            batch.x.copy_(self.tables.advance(step, batch.x, velocity(step)))
