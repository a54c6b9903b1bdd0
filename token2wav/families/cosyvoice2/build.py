"""CosyVoice2 as stages: its weights are loaded and put on a device, and its networks get what runs them there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from token2wav.cache.paged_kv_cache import BRANCHES, CacheLayout, PagedKVCache, Storage
from token2wav.config import StreamConfig
from token2wav.errors import ConfigError
from token2wav.execution.backends import Host
from token2wav.execution.cached_flow import CachedFlow
from token2wav.execution.device import cache_bytes, keep_arithmetic_exact
from token2wav.execution.recompute import RecomputeFlow
from token2wav.execution.runner import GraphPool, Runner, graphs_enabled
from token2wav.execution.stages import Networks, Stages, StageSummary
from token2wav.execution.vocoder import StreamingVocoder, likely_pieces
from token2wav.families.cosyvoice2.config import CosyVoice2Config
from token2wav.families.cosyvoice2.flow import Flow, cosyvoice2_flow
from token2wav.families.cosyvoice2.step import ConvolutionalStep, conv_state_shape
from token2wav.families.cosyvoice3.build import CAPTURED_STREAMS, streaming_hift
from token2wav.families.cosyvoice3.weights import checked, filled
from token2wav.model_config import ModelConfig
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, NormalNoise
from token2wav.networks.ode import EulerSolver
from token2wav.networks.unet import UNet
from token2wav.networks.weights import Blank

log = logging.getLogger(__name__)


def build(host: Host, config: CosyVoice2Config, stream: StreamConfig) -> Stages:
    """Makes the stages of a model.

    Raises:
        ConfigError: the settings ask for what there is for other families only.
        CheckpointError: weights are missing, unreadable, or do not fit the configuration.
    """
    check_settings(host, stream)
    with Blank():
        flow, hift = cosyvoice2_flow(config.flow), HiFT(config.hift)
    filled(flow, config.weights_file(host.folder, "flow")).eval().requires_grad_(False)
    filled(hift, config.weights_file(host.folder, "hift")).freeze()
    guidance, allowed = config.flow.inference_cfg_rate, config.allowed_steps(stream.steps)
    flow = flow.to(host.device)
    solvers = {steps: EulerSolver(flow.estimator, steps, guidance) for steps in allowed}
    return Stages(
        cached_flow(host, config, stream, flow, solvers, _attention(flow, config)),
        vocoder_stage(host, config, stream, hift.to(host.device)),
        summary(host),
    )


def check(folder: Path, config: CosyVoice2Config) -> None:
    """Reads the weights of a folder without building anything on a device.

    Raises:
        CheckpointError: the folder cannot be served, and why.
    """
    with Blank():
        flow, hift = cosyvoice2_flow(config.flow), HiFT(config.hift)
    checked(flow, config.weights_file(folder, "flow"))
    checked(hift, config.weights_file(folder, "hift"))


def check_settings(host: Host, stream: StreamConfig, *, reference: bool = False) -> None:
    """Refuses settings that are for CosyVoice3 only, `stream.reference` among them unless the family has that too."""
    if (engine := host.runtime.engine) not in ("auto", "torch"):
        raise ConfigError(f"runtime.engine: {engine} does not run this family; take torch")
    if stream.reference and not reference:
        raise ConfigError("stream.reference: the public loop of this family is not repeated; leave it out")


def summary(host: Host) -> StageSummary:
    """Says what the stages of such a family run on."""
    found = StageSummary("torch", host.precision, str(host.device))
    log.info("backend %s, %s, on %s, without kernels and graphs of the flow", found.name, found.precision, found.device)
    return found


def networks(config: CosyVoice2Config, storage: Storage) -> Networks:
    """Makes flow and vocoder without weights, see `token2wav.families`."""
    flow, guidance = cosyvoice2_flow(config.flow), config.flow.inference_cfg_rate
    layout = cache_layout(config, flow, _attention(flow, config), guidance, config.ode_steps, storage)
    return Networks(flow, HiFT(config.hift), layout, guidance, token_bytes=flow.encoder.token_bytes)


def _attention(flow: Flow[UNet], config: CosyVoice2Config) -> tuple[int, int, int]:
    return flow.estimator.attentions, config.flow.estimator.heads, config.flow.estimator.dim_head


def cache_layout(
    config: ModelConfig,
    flow: Flow[Any],
    attention: tuple[int, int, int],
    guidance: float,
    steps: int,
    storage: Storage,
) -> CacheLayout:
    """Returns the layout of a model whose streams have so many ODE steps at most; the rest as for `cached_flow`."""
    layers, heads, dim_head = attention
    branches = BRANCHES if guidance else 1
    return CacheLayout(
        steps=steps,
        layers=layers,
        heads=heads,
        dim_head=dim_head,
        block_frames=config.token_mel_ratio * config.block_tokens,
        storage=storage,
        branches=branches,
        bands=config.mel_bands,
        conv_state=conv_state_shape(flow.estimator, branches),
    )


def cached_flow(
    host: Host,
    config: ModelConfig,
    stream: StreamConfig,
    flow: Flow[Any],
    solvers: Mapping[int, EulerSolver],
    attention: tuple[int, int, int],
) -> CachedFlow:
    """Makes the incremental flow stage on torch.

    Args:
        host: with the device on which the flow is.
        config: of the model.
        stream: how streams are cut into chunks.
        flow: with its weights. Those that its solvers have made tables of are dropped.
        solvers: of its estimator, by numbers of ODE steps, the usual one first.
        attention: layers with keys and values, heads, and channels of a head.
    """
    keep_arithmetic_exact(host.device)
    flow.estimator.drop_time_weights()
    if host.precision == "float16":
        flow.estimator.halve()
    storage = host.precision if host.runtime.cache_storage == "auto" else host.runtime.cache_storage
    guidance = next(iter(solvers.values())).tables.guidance
    layout = cache_layout(config, flow, attention, guidance, max(solvers), storage)
    cache = PagedKVCache(layout, cache_bytes(host.runtime.cache_mib, host.device) // layout.page_bytes, host.device)
    runners = {
        steps: Runner(ConvolutionalStep(flow.estimator, solver.tables, cache)) for steps, solver in solvers.items()
    }
    noise = FlowNoise(config.mel_bands)
    recompute = RecomputeFlow(config, flow, noise, solvers, left_blocks=config.window(stream))
    return CachedFlow(recompute, runners, cache, longest_hop=config.hops(stream)[1])


def vocoder_stage(host: Host, config: ModelConfig, stream: StreamConfig, hift: HiFT) -> StreamingVocoder:
    """Makes the stage of a HiFT with its weights, on the device of a host."""
    pool = GraphPool(host.device) if graphs_enabled(host.device) else None
    shapes = likely_pieces(hift.lookahead_frames, config, config.hops(stream), CAPTURED_STREAMS) if pool else []
    noise = NormalNoise(hift.config.nb_harmonics + 1)
    return streaming_hift(hift, noise, shapes=shapes, graphs=pool, hold_frames=stream.hold_frames)
