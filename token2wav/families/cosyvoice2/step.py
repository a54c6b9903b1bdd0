"""Step function of estimators whose convolutions keep tails of their own: U-Net and Step-Audio2's DiT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.batch import Batch
from token2wav.execution.step import BlockMemory, StepFunction, Velocity
from token2wav.networks.dit import Memory
from token2wav.networks.ode import OdeTables
from token2wav.networks.unet import CausalConv


class Convolutional(Protocol):
    """Estimator without positions, in which every convolution keeps the end of its own input."""

    @property
    def convolutions(self) -> Sequence[CausalConv]:
        """All of them, in the order of their `index`."""

    def velocity(
        self,
        x: torch.Tensor,
        mu: torch.Tensor,
        spks: torch.Tensor,
        cond: torch.Tensor,
        modulation: Any,
        bias: torch.Tensor | None,
        memory: Memory | None = None,
    ) -> torch.Tensor: ...


def conv_state_shape(estimator: Convolutional, branches: int) -> tuple[int, ...]:
    """Shape of what all convolutions keep of a stream at one ODE step, one behind the other (`CacheLayout`)."""
    return branches, sum(math.prod(conv.keeps) for conv in estimator.convolutions)


class ConvolutionalStep(StepFunction):
    """Step function on torch, eagerly.

    Args:
        estimator: on the device of the cache.
        tables: of the ODE's schedule.
        cache: of keys and values, with a layout of `conv_state_shape`.
    """

    def __init__(self, estimator: Convolutional, tables: OdeTables, cache: PagedKVCache) -> None:
        super().__init__(tables, cache)
        self._estimator = estimator
        self._keeps = [conv.keeps for conv in estimator.convolutions]
        self._starts = list(accumulate((math.prod(shape) for shape in self._keeps), initial=0))

    def __call__(self, batch: Batch) -> Velocity:
        mu, speakers, cond = self.tables.conditions(batch.mu, batch.speakers, batch.cond)
        memory = BlockMemory(batch, self.cache, self._tail)

        def velocity(step: int) -> torch.Tensor:
            memory.step = step
            x, modulation = self.tables.rows(batch.x), self.tables.modulation[step]
            return self._estimator.velocity(x, mu, speakers, cond, modulation, None, memory)

        return velocity

    def _tail(self, state: torch.Tensor, index: int) -> torch.Tensor:
        return state[:, self._starts[index] : self._starts[index + 1]].unflatten(1, self._keeps[index])
