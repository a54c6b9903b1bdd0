"""CosyVoice3 as stages: its weights are loaded and put on a device, and its networks get what runs them there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from token2wav.cache.paged_kv_cache import BRANCHES, CacheLayout, PagedKVCache, Storage
from token2wav.config import StreamConfig
from token2wav.execution.backends import Graphs, Host, choose, runner
from token2wav.execution.cached_flow import CachedFlow
from token2wav.execution.device import cache_bytes, keep_arithmetic_exact
from token2wav.execution.exported_graphs import ExportedVocoder
from token2wav.execution.exported_step import StepFactory
from token2wav.execution.recompute import RecomputeFlow, RecomputeVocoder
from token2wav.execution.runner import GraphPool, graphs_enabled
from token2wav.execution.stages import FlowStage, Networks, Stages, StageSummary, VocoderStage
from token2wav.execution.step import StepFunction
from token2wav.execution.vocoder import PieceShape, StreamingVocoder, likely_pieces
from token2wav.families.bigvgan.build import recomputed_bigvgan, streaming_bigvgan
from token2wav.families.bigvgan.network import BigVGAN
from token2wav.families.cosyvoice3.config import CosyVoice3Config, FlowConfig
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.cosyvoice3.steps import TorchStep
from token2wav.families.cosyvoice3.weights import (
    check,
    load_flow,
    load_flow_noise,
    load_source_noise,
    load_vocoder,
    modules,
)
from token2wav.model_config import ModelConfig, Stem
from token2wav.networks.dit import CONTEXT_FRAMES, DiT
from token2wav.networks.hift import Decode, HiFT
from token2wav.networks.noise import FlowNoise, NoiseTable, SourceNoise
from token2wav.networks.ode import EulerSolver
from token2wav.networks.source import Phase
from token2wav.networks.streaming import Piece

__all__ = ["build", "check", "networks"]

log = logging.getLogger(__name__)

CAPTURED_STREAMS = 32  # of a batch of the vocoder; larger ones run in parts


class DiTSteps(StepFactory):
    """Step functions of a DiT."""

    estimator: DiT

    def eager(self) -> StepFunction:
        return TorchStep(self.estimator, self.tables, self.cache)

    def kernels(self) -> StepFunction | None:
        from token2wav.families.cosyvoice3.kernel_step import KernelStep  # Triton-language kernels

        return KernelStep(self.estimator, self.tables, self.cache)


def build(host: Host, config: CosyVoice3Config, stream: StreamConfig) -> Stages:
    """Makes the stages of a model.

    Raises:
        ConfigError: the backend that the configuration names cannot run here.
        CheckpointError: weights are missing, unreadable, or do not fit the configuration.
    """
    graphs = choose(host, stream)  # before weights load: it may refuse
    flow, solvers = loaded_flow(host, config, stream)
    pool = GraphPool(host.device) if graphs_enabled(host.device) else None
    vocoder = vocoder_stage(host, config, stream, graphs, pool)
    noise = load_flow_noise(host.folder, config)
    summary = StageSummary(graphs.backend, host.precision, str(host.device))
    log.info("backend %s, %s, on %s", summary.name, summary.precision, summary.device)
    stage: FlowStage
    if stream.reference:
        stage = RecomputeFlow(config, flow, noise, solvers, full_tail=True, left_blocks=config.window(stream))
        return Stages(stage, vocoder, summary)
    stage = incremental(host, config, stream, flow, noise, solvers, graphs, DiTSteps, pool)
    return Stages(stage, vocoder, summary)


def incremental(
    host: Host,
    config: ModelConfig,
    stream: StreamConfig,
    flow: Any,
    noise: FlowNoise,
    solvers: Mapping[int, EulerSolver],
    graphs: Graphs,
    factory: type[StepFactory],
    pool: GraphPool | None = None,
) -> CachedFlow:
    """Makes the incremental flow stage as the settings have it, see `cached_flow`."""
    return cached_flow(
        config,
        flow,
        noise,
        solvers,
        graphs,
        factory,
        pool=pool,
        cache_bytes=cache_bytes(host.runtime.cache_mib, host.device),
        storage=host.precision if host.runtime.cache_storage == "auto" else host.runtime.cache_storage,
        left_blocks=config.window(stream),
        longest_hop=config.hops(stream)[1],
    )


def load(folder: Path, config: CosyVoice3Config, stem: Stem) -> Flow | HiFT | BigVGAN:
    """Loads flow or vocoder in float32 on the CPU, see `token2wav.families`."""
    return load_flow(folder, config) if stem == "flow" else load_vocoder(folder, config)


def loaded_flow(host: Host, config: CosyVoice3Config, stream: StreamConfig) -> tuple[Flow, dict[int, EulerSolver]]:
    """Loads the flow onto the device of a host, with solvers by numbers of ODE steps, the usual one first."""
    keep_arithmetic_exact(host.device)
    flow = load_flow(host.folder, config).to(host.device)
    guidance, allowed = config.flow.inference_cfg_rate, config.allowed_steps(stream.steps)
    solvers = {steps: EulerSolver(flow.estimator, steps, guidance, config.schedule) for steps in allowed}
    flow.estimator.drop_time_weights()
    if host.precision == "float16":
        flow.estimator.halve()
    return flow, solvers


def networks(config: CosyVoice3Config, storage: Storage) -> Networks:
    """Makes flow and vocoder without weights, see `token2wav.families`."""
    flow, vocoder = modules(config)
    guidance = config.flow.inference_cfg_rate
    return Networks(flow, vocoder, cache_layout(config.flow, storage), guidance, config.schedule)


def cache_layout(config: FlowConfig, storage: Storage = "float32", steps: int = 0) -> CacheLayout:
    """Returns the layout of a model; `steps` are the most that a stream has, 0 for the model's own number."""
    estimator, branches = config.estimator, BRANCHES if config.inference_cfg_rate else 1
    return CacheLayout(
        steps=steps or config.n_timesteps,
        layers=estimator.depth,
        heads=estimator.heads,
        dim_head=estimator.dim_head,
        block_frames=estimator.static_chunk_size,
        storage=storage,
        branches=branches,
        bands=estimator.mel_dim,
        conv_state=(branches, 2 * estimator.dim * CONTEXT_FRAMES),  # inputs of the two position convolutions
    )


def cached_flow(
    config: ModelConfig,
    flow: Any,
    noise: FlowNoise,
    solvers: Mapping[int, EulerSolver],
    graphs: Graphs = Graphs("torch"),  # noqa: B008 (it is frozen)
    factory: type[StepFactory] = DiTSteps,
    *,
    cache_bytes: int,
    pool: GraphPool | None = None,
    storage: Storage = "float32",
    left_blocks: int = -1,
    longest_hop: int = 100,
) -> CachedFlow:
    """Makes the incremental flow stage, on torch or on an exported graph.

    Args:
        config, noise, solvers, left_blocks: see `RecomputeFlow`. A page has room for the most steps of all solvers.
        flow: on the device that is to be used.
        graphs, factory: what executes the estimator, and makes its step functions.
        cache_bytes, storage: size of the page pool, and type of cached keys and values.
        pool: of the model's CUDA graphs; None runs without.
        longest_hop: see `CachedFlow`.
    """
    guidance = next(iter(solvers.values())).tables.guidance
    layout = CacheLayout.of(config, flow.estimator, guidance, max(solvers), storage)
    cache = PagedKVCache(layout, cache_bytes // layout.page_bytes, flow.device)
    with torch.inference_mode():
        factories = {steps: factory(flow.estimator, solver.tables, cache) for steps, solver in solvers.items()}
        longest = longest_hop // config.block_tokens
        runners = {steps: runner(graphs, factories[steps], cache, longest, pool) for steps in solvers}
    recompute = RecomputeFlow(config, flow, noise, solvers, left_blocks=left_blocks)
    return CachedFlow(recompute, runners, cache, longest_hop=longest_hop)


def vocoder_stage(
    host: Host, config: CosyVoice3Config, stream: StreamConfig, graphs: Graphs, pool: GraphPool | None
) -> VocoderStage:
    """Makes the stage of the vocoder which the model folder names."""
    vocoder = load_vocoder(host.folder, config).to(host.device)
    if stream.reference:
        if isinstance(vocoder, BigVGAN):
            return recomputed_bigvgan(vocoder)
        return recomputed_hift(vocoder, load_source_noise(host.folder, config), "reference")
    noise = None if isinstance(vocoder, BigVGAN) else load_source_noise(host.folder, config)
    return streaming_vocoder(vocoder, noise, config, stream, graphs, pool)


def streaming_vocoder(
    vocoder: HiFT | BigVGAN,
    noise: SourceNoise | None,
    config: ModelConfig,
    stream: StreamConfig,
    graphs: Graphs,
    pool: GraphPool | None,
) -> StreamingVocoder:
    """Makes the stage of a vocoder in pieces, with the noise of its source if it has one."""
    exported = ExportedVocoder(graphs.vocoder, vocoder) if graphs.vocoder else None
    pool = pool if exported is None else None
    shapes = likely_pieces(vocoder.lookahead_frames, config, config.hops(stream), CAPTURED_STREAMS) if pool else []
    if isinstance(vocoder, BigVGAN):
        return streaming_bigvgan(vocoder, exported, shapes=shapes, graphs=pool, hold_frames=stream.hold_frames)
    assert noise is not None
    return streaming_hift(vocoder, noise, exported, shapes=shapes, graphs=pool, hold_frames=stream.hold_frames)


def streaming_hift(
    hift: HiFT,
    noise: SourceNoise,
    decode: Decode | None = None,
    *,
    shapes: Sequence[PieceShape] = (),
    graphs: GraphPool | None = None,
    hold_frames: int = 0,
) -> StreamingVocoder:
    """Makes the stage in pieces; `decode` runs `HiFT.decode` inside of streams on another backend than torch."""

    def run(mel: torch.Tensor, drawn: torch.Tensor, piece: Piece) -> torch.Tensor:
        return hift(mel, drawn, piece, decode=None if piece.first or piece.beyond else decode)

    def whole(mel: torch.Tensor) -> torch.Tensor:
        return hift.vocode(mel[None], noise)[0]

    table = NoiseTable(noise, hift.m_source)
    return StreamingVocoder(hift, run, whole, table, shapes=shapes, graphs=graphs, hold_frames=hold_frames)


def recomputed_hift(hift: HiFT, noise: SourceNoise, phase: Phase = "exact") -> RecomputeVocoder:
    """Makes the stage that recomputes everything; `phase` is the rounding of the source's phase."""
    return RecomputeVocoder(hift, lambda mel: hift.vocode(mel[None], noise, phase=phase)[0])
