"""From a model folder and a configuration to the two engines that serve it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache, Storage
from token2wav.config import RuntimeConfig, StreamConfig
from token2wav.errors import ConfigError
from token2wav.execution.backends import EngineSummary, Graphs, Host, choose, runner
from token2wav.execution.bigvgan_stage import BigVGANEngine
from token2wav.execution.cached_flow import CachedFlowEngine
from token2wav.execution.cuda_graphs import GraphPool, graphs_enabled
from token2wav.execution.device import cache_bytes, keep_arithmetic_exact
from token2wav.execution.exported_vocoder import ExportedVocoder
from token2wav.execution.hift_stage import HiFTEngine
from token2wav.execution.recompute import RecomputeBigVGANEngine, RecomputeFlowEngine, RecomputeVocoderEngine
from token2wav.execution.stages import FlowEngine, VocoderEngine
from token2wav.execution.vocoder import PieceShape, likely_pieces
from token2wav.execution.window_flow import WindowFlowEngine
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.cosyvoice3.weights import load_flow, load_flow_noise, load_source_noise, load_vocoder
from token2wav.model_config import ModelConfig
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.guided import GuidedSolver
from token2wav.networks.noise import FlowNoise
from token2wav.networks.ode import EulerSolver

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
    _check_engine(config, stream, runtime := host.runtime)
    graphs = Graphs("torch") if stream.reference else choose(host)  # before weights load: it may refuse
    device = host.device
    keep_arithmetic_exact(device)
    flow = load_flow(host.folder, config).to(device)
    pool = GraphPool(device) if graphs_enabled(device) else None
    vocoder_engine = _vocoder_engine(host, config, stream, graphs, pool)
    flow_noise = load_flow_noise(host.folder, config)
    guidance, allowed = config.flow.inference_cfg_rate, config.allowed_steps(stream.steps)
    solvers = {steps: EulerSolver(flow.estimator, steps, guidance, config.schedule) for steps in allowed}
    flow.estimator.drop_time_weights()
    if host.precision == "float16":
        flow.estimator.halve()
    summary = EngineSummary(graphs.engine, host.precision, str(device))
    log.info("engine %s, %s, on %s", summary.name, summary.precision, summary.device)
    if config.flow.guided is not None:
        windows = {steps: GuidedSolver(flow.estimator, solver.tables) for steps, solver in solvers.items()}
        return WindowFlowEngine(flow, flow_noise, windows), vocoder_engine, summary
    if stream.reference:
        recompute = RecomputeFlowEngine(flow, flow_noise, solvers, full_tail=True, left_blocks=stream.left_blocks)
        return recompute, vocoder_engine, summary
    flow_engine = cached_flow_engine(
        flow,
        flow_noise,
        solvers,
        graphs,
        pool=pool,
        cache_bytes=cache_bytes(runtime.cache_mib, device),
        storage=host.precision if runtime.cache_storage == "auto" else runtime.cache_storage,
        left_blocks=stream.left_blocks,
        longest_hop=config.flow.hops(stream)[1],
    )
    return flow_engine, vocoder_engine, summary


def _check_engine(config: ModelConfig, stream: StreamConfig, runtime: RuntimeConfig) -> None:
    """Refuses an engine that does not run the model, or not as the reference."""
    if runtime.engine in ("auto", "torch"):
        return
    if config.flow.guided is not None:
        raise ConfigError(f"runtime.engine: {runtime.engine} does not run guided attention; take torch")
    if stream.reference:
        raise ConfigError(f"runtime.engine: {runtime.engine} does not run stream.reference; take torch")


def _vocoder_engine(
    host: Host, config: ModelConfig, stream: StreamConfig, graphs: Graphs, pool: GraphPool | None
) -> VocoderEngine:
    """That of the vocoder which the model folder names."""
    vocoder = load_vocoder(host.folder, config).to(host.device)
    if stream.reference:
        if isinstance(vocoder, BigVGAN):
            return RecomputeBigVGANEngine(vocoder)
        return RecomputeVocoderEngine(vocoder, load_source_noise(host.folder, config), "reference")
    exported = ExportedVocoder(graphs.vocoder, vocoder) if graphs.vocoder else None
    shapes: list[PieceShape] = []
    graphs_of_pieces = pool if exported is None else None
    if graphs_of_pieces:
        shapes = likely_pieces(vocoder.lookahead_frames, config.flow, config.flow.hops(stream), _CAPTURED_STREAMS)
    if isinstance(vocoder, BigVGAN):
        return BigVGANEngine(vocoder, exported, shapes=shapes, graphs=graphs_of_pieces)
    noise = load_source_noise(host.folder, config)
    return HiFTEngine(vocoder, noise, exported, shapes=shapes, graphs=graphs_of_pieces)


def cached_flow_engine(
    flow: Flow,
    noise: FlowNoise,
    solvers: Mapping[int, EulerSolver],
    graphs: Graphs = Graphs("torch"),  # noqa: B008 (it is frozen)
    *,
    cache_bytes: int,
    pool: GraphPool | None = None,
    storage: Storage = "float32",
    left_blocks: int = -1,
    longest_hop: int = 100,
) -> CachedFlowEngine:
    """The incremental engine, on torch or on an exported graph.

    Args:
        flow: on the device that is to be used.
        noise: of the flow.
        solvers: of the flow's estimator, by number of ODE steps; the usual number comes first. A page has room for the
            most of them.
        graphs: what executes the estimator.
        cache_bytes: size of the page pool.
        pool: of the model's CUDA graphs; None runs without.
        storage: type of cached keys and values.
        left_blocks, longest_hop: see `CachedFlowEngine`.
    """
    layout = CacheLayout.of(flow.config, storage, max(solvers))
    device = flow.spk_embed_affine_layer.weight.device
    cache = PagedKVCache(layout, cache_bytes // layout.page_bytes, device)
    with torch.inference_mode():
        runners = {
            steps: runner(graphs, flow, solver.tables, cache, longest_hop, pool) for steps, solver in solvers.items()
        }
    recompute = RecomputeFlowEngine(flow, noise, solvers, left_blocks=left_blocks)
    return CachedFlowEngine(flow, noise, runners, cache, recompute, left_blocks=left_blocks, longest_hop=longest_hop)
