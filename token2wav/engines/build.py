"""From a model folder and a configuration to the two engines that serve it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch

from token2wav.checkpoint import load_flow, load_flow_noise, load_source_noise, load_vocoder
from token2wav.config import RuntimeConfig, StreamConfig
from token2wav.engines.base import FlowEngine, VocoderEngine
from token2wav.engines.bigvgan_engine import BigVGANEngine
from token2wav.engines.cached_engine import CachedFlowEngine
from token2wav.engines.choice import EngineSummary, Graphs, Host, choose, chunk_solver
from token2wav.engines.cuda_graphs import graphs_enabled
from token2wav.engines.exact_convolutions import keep_convolutions_exact
from token2wav.engines.exported_vocoder import ExportedVocoder
from token2wav.engines.hift_engine import HiFTEngine
from token2wav.engines.memory import cache_bytes
from token2wav.engines.recompute_engine import RecomputeBigVGANEngine, RecomputeFlowEngine, RecomputeVocoderEngine
from token2wav.engines.stepped_engine import SteppedFlowEngine
from token2wav.engines.vocoder_engine import PieceShape, likely_pieces
from token2wav.engines.window_engine import WindowFlowEngine
from token2wav.errors import ConfigError
from token2wav.flow.cache import CacheLayout, KeyValueStore, Storage
from token2wav.flow.flow import Flow
from token2wav.flow.guided import GuidedSolver
from token2wav.flow.noise import FlowNoise
from token2wav.flow.solver import EulerSolver
from token2wav.model_config import ModelConfig
from token2wav.vocoder.bigvgan import BigVGAN

log = logging.getLogger(__name__)

_CAPTURED_STREAMS = 32  # of a batch of the vocoder; larger ones run in parts


def build_engines(
    host: Host, config: ModelConfig, stream: StreamConfig
) -> tuple[FlowEngine, VocoderEngine, EngineSummary]:
    """Loads weights and graphs.

    Args:
        host: model folder, runtime configuration and device.
        config: of the model.
        stream: how streams are cut into chunks.

    Raises:
        ConfigError: the engine that the configuration names cannot run here.
        CheckpointError: weights are missing, unreadable, or do not fit the configuration.
    """
    _check_engine(config, runtime := host.runtime)
    graphs = choose(host)  # before weights load: it may refuse
    device = host.device
    keep_convolutions_exact(device)
    flow = load_flow(host.folder, config).to(device)
    vocoder_engine = _vocoder_engine(host, config, stream, graphs)
    flow_noise = load_flow_noise(host.folder, config)
    guidance, allowed = config.flow.inference_cfg_rate, config.allowed_steps(stream.steps)
    solvers = {steps: EulerSolver(flow.estimator, steps, guidance, config.schedule) for steps in allowed}
    flow.estimator.drop_time_weights()
    if host.precision == "float16":
        flow.estimator.halve()
    summary = EngineSummary(graphs.engine, host.precision, str(device))
    log.info("engine %s, %s, on %s", summary.name, summary.precision, summary.device)
    if config.flow.guided is not None:
        windows = {
            steps: WindowFlowEngine(flow, flow_noise, GuidedSolver(flow.estimator, solver.tables))
            for steps, solver in solvers.items()
        }
        return _of_all_steps(windows), vocoder_engine, summary
    if not runtime.incremental:
        recompute = {
            steps: RecomputeFlowEngine(
                flow,
                flow_noise,
                solver,
                tail=stream.tail,
                left_blocks=stream.left_blocks,
                keep_prompt=stream.keep_prompt,
            )
            for steps, solver in solvers.items()
        }
        return _of_all_steps(recompute), vocoder_engine, summary
    flow_engines = cached_flow_engines(
        flow,
        flow_noise,
        solvers,
        graphs,
        cache_bytes=cache_bytes(runtime.cache_mib, device),
        storage=host.precision if runtime.cache_storage == "auto" else runtime.cache_storage,
        left_blocks=stream.left_blocks,
        keep_prompt=stream.keep_prompt,
        longest_hop=config.flow.hops(stream)[1],
        tail=stream.tail,
    )
    return _of_all_steps(flow_engines), vocoder_engine, summary


def _of_all_steps(engines: Mapping[int, FlowEngine]) -> FlowEngine:
    [first, *others] = engines.values()
    return SteppedFlowEngine(engines) if others else first


def _check_engine(config: ModelConfig, runtime: RuntimeConfig) -> None:
    """Refuses what there is for causal attention only."""
    if config.flow.guided is None:
        return
    if runtime.engine not in ("auto", "torch"):
        raise ConfigError(f"runtime.engine: {runtime.engine} does not run guided attention; take torch")
    if not runtime.incremental:
        raise ConfigError("runtime.incremental: false does not go with guided attention, whose windows keep nothing")


def _vocoder_engine(host: Host, config: ModelConfig, stream: StreamConfig, graphs: Graphs) -> VocoderEngine:
    """That of the vocoder which the model folder names."""
    vocoder = load_vocoder(host.folder, config).to(host.device)
    if not host.runtime.incremental:
        if isinstance(vocoder, BigVGAN):
            return RecomputeBigVGANEngine(vocoder)
        return RecomputeVocoderEngine(vocoder, load_source_noise(host.folder, config), stream.phase)
    exported = ExportedVocoder(graphs.vocoder, vocoder) if graphs.vocoder else None
    shapes: list[PieceShape] = []
    if exported is None and graphs_enabled(host.device):
        shapes = likely_pieces(vocoder.lookahead_frames, config.flow, config.flow.hops(stream), _CAPTURED_STREAMS)
    if isinstance(vocoder, BigVGAN):
        return BigVGANEngine(vocoder, exported, shapes=shapes, capture=bool(shapes))
    noise = load_source_noise(host.folder, config)
    return HiFTEngine(vocoder, noise, stream.phase, exported, shapes=shapes, capture=bool(shapes))


def cached_flow_engine(flow: Flow, noise: FlowNoise, solver: EulerSolver, **options: Any) -> CachedFlowEngine:
    """The incremental engine of one number of steps. Arguments are those of `cached_flow_engines`."""
    [engine] = cached_flow_engines(flow, noise, {len(solver.tables.widths): solver}, **options).values()
    return engine


def cached_flow_engines(
    flow: Flow,
    noise: FlowNoise,
    solvers: Mapping[int, EulerSolver],
    graphs: Graphs = Graphs("torch"),  # noqa: B008 (it is frozen)
    *,
    cache_bytes: int,
    storage: Storage = "float32",
    left_blocks: int = -1,
    keep_prompt: bool = True,
    longest_hop: int = 100,
    tail: Literal["streaming", "full"] = "streaming",
) -> dict[int, CachedFlowEngine]:
    """Incremental engines by number of steps, on torch or on an exported graph, with one pool of pages.

    Args:
        flow: on the device that is to be used.
        noise: of the flow.
        solvers: of the flow's estimator, by number of steps. A page has room for the most of them.
        graphs: what executes the estimator.
        cache_bytes: size of the page pool.
        storage: type of cached keys and values.
        left_blocks, keep_prompt, longest_hop, tail: see `CachedFlowEngine`.
    """
    layout = CacheLayout.of(flow.config, storage, max(solvers))
    device = flow.spk_embed_affine_layer.weight.device
    store = KeyValueStore(layout, cache_bytes // layout.page_bytes, device)
    engines: dict[int, CachedFlowEngine] = {}
    for steps, solver in solvers.items():
        with torch.inference_mode():
            chunks = chunk_solver(graphs, flow, solver, store, left_blocks, longest_hop)
        engines[steps] = CachedFlowEngine(
            flow,
            noise,
            chunks,
            store,
            RecomputeFlowEngine(flow, noise, solver, tail=tail, left_blocks=left_blocks, keep_prompt=keep_prompt),
            left_blocks=left_blocks,
            keep_prompt=keep_prompt,
            longest_hop=longest_hop,
            tail=tail,
            sharing=next(iter(engines.values()), None),
        )
    return engines
