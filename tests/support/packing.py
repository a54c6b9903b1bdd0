"""Padded batches with torch for the arithmetic, as on a GPU without exported graphs or kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from token2wav.engines.packed import Batch, BatchShape, PackedBatch
from token2wav.engines.packed_solver import Steps
from token2wav.engines.torch_steps import TorchSteps
from token2wav.flow.cache import KeyValueStore
from token2wav.flow.dit import DiT
from token2wav.flow.solver import OdeTables
from token2wav.flow_config import EstimatorConfig


def on_torch(
    estimator: DiT, config: EstimatorConfig, tables: OdeTables, store: KeyValueStore, left_blocks: int = -1
) -> Callable[[BatchShape], tuple[Batch, Steps]]:
    """What `PackedChunkSolver` prepares its shapes with."""

    def prepare(shape: BatchShape) -> tuple[Batch, Steps]:
        batch = PackedBatch(shape, config, store, left_blocks, torch.device("cpu"))
        return batch, TorchSteps(batch, estimator, tables, store)

    return prepare
