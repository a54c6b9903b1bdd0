"""Models that tests put together by hand, from parts that they have made or changed: the
incremental flow on torch, and the model that recomputes every chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from testkit.batches import WHOLE_BLOCKS
from token2wav import StreamConfig, Token2Wav
from token2wav.assembly import load_network
from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache, Storage
from token2wav.config.model_config import ModelConfig
from token2wav.execution.runner import FlowRunner
from token2wav.execution.step import TorchStep
from token2wav.families.cosyvoice3.noise import load_flow_noise, load_source_noise
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver, OdeTables
from token2wav.published.registry import read_config
from token2wav.stages.cached_flow import CachedFlow, flow_states
from token2wav.stages.recompute import RecomputeFlow, RecomputeVocoder
from token2wav.stages.stage import Stages, StageSummary


def two_stages(flow: Any, vocoder: Any, summary: StageSummary | None = None) -> Stages:
    return Stages(
        {"flow": flow, "vocoder": vocoder}, summary or StageSummary("torch", "float32", "cpu")
    )


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


def recomputing(folder: Path, stream: StreamConfig | None = None) -> Token2Wav:
    """Loads a model that recomputes every chunk under the streaming mask: the oracle of the cached
    model.
    """
    config: Any = read_config(folder)
    stream = stream or WHOLE_BLOCKS
    flow, vocoder = load_network(folder, config, "flow"), load_network(folder, config, "vocoder")
    guidance, allowed = config.flow.inference_cfg_rate, config.allowed_steps(stream.steps)
    solvers = {
        steps: EulerSolver(flow.estimator, steps, guidance, config.schedule) for steps in allowed
    }
    engine = RecomputeFlow(
        config, flow, load_flow_noise(folder, config), solvers, left_blocks=config.window(stream)
    )
    if isinstance(vocoder, BigVGAN):
        return Token2Wav(config, two_stages(engine, RecomputeVocoder(vocoder)), stream)
    noise = load_source_noise(folder, config)
    return Token2Wav(config, two_stages(engine, RecomputeVocoder(vocoder, noise)), stream)
