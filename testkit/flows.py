"""The incremental flow on torch, from parts of a model that tests have made or changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache, Storage
from token2wav.config.model_config import ModelConfig
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step import TorchStep
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver, OdeTables
from token2wav.stages.cached_flow import CachedFlow, flow_states
from token2wav.stages.recompute import RecomputeFlow


def cached_flow(
    config: ModelConfig,
    flow: Any,
    noise: FlowNoise,
    solvers: Mapping[int, EulerSolver],
    *,
    pages: int,
    storage: Storage = "float32",
    left_blocks: int = -1,
    longest_hop: int = 100,
    provisional_steps: int = 0,
) -> CachedFlow:
    """Returns an incremental flow on torch. `provisional_steps` are the ODE steps of provisional
    chunks; 0 for the steps of all chunks.
    """
    guidance = next(iter(solvers.values())).tables.guidance
    layout = CacheLayout.of(config, flow.estimator, guidance, max(solvers), storage)
    cache = PagedKVCache(layout, pages, flow.device)
    states = flow_states(flow, flow.estimator, layout)
    with torch.inference_mode():
        runners = {
            steps: FlowRunner(TorchStep(flow.estimator, solver.tables, cache), states)
            for steps, solver in solvers.items()
        }
        provisional_tables = {
            steps: OdeTables.of(flow.estimator, steps, guidance, evaluated=provisional_steps)
            for steps in solvers
            if provisional_steps
        }
        provisional_runners = {
            steps: FlowRunner(TorchStep(flow.estimator, tables, cache), states)
            for steps, tables in provisional_tables.items()
        }
    recompute = RecomputeFlow(config, flow, noise, solvers, left_blocks=left_blocks)
    return CachedFlow(
        recompute,
        runners,
        cache,
        states,
        provisional_runners=provisional_runners,
        longest_hop=longest_hop,
    )
