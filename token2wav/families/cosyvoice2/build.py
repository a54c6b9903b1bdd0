"""CosyVoice2 as stages: its weights are loaded and put on a device, and its networks get what runs them there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from token2wav.cache.paged_kv_cache import CacheLayout, Storage
from token2wav.config import StreamConfig
from token2wav.errors import ConfigError
from token2wav.execution.backends import Graphs, Host, choose
from token2wav.execution.cached_flow import CachedFlow
from token2wav.execution.device import keep_arithmetic_exact
from token2wav.execution.exported_step import StepFactory
from token2wav.execution.runner import GraphPool, graphs_enabled
from token2wav.execution.stages import Networks, Stages, StageSummary
from token2wav.execution.vocoder import StreamingVocoder
from token2wav.families.cosyvoice2.config import CosyVoice2Config
from token2wav.families.cosyvoice2.flow import Flow, cosyvoice2_flow
from token2wav.families.cosyvoice3.build import incremental, streaming_vocoder
from token2wav.families.cosyvoice3.weights import checked, filled
from token2wav.model_config import ModelConfig, Stem
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, NormalNoise
from token2wav.networks.ode import EulerSolver
from token2wav.networks.weights import Blank

_Module = TypeVar("_Module", bound=nn.Module)

log = logging.getLogger(__name__)


def build(host: Host, config: CosyVoice2Config, stream: StreamConfig) -> Stages:
    """Makes the stages of a model.

    Raises:
        ConfigError: the settings ask for what there is for other families only.
        CheckpointError: weights are missing, unreadable, or do not fit the configuration.
    """
    graphs = chosen(host, stream)
    flow, hift = load(host.folder, config, "flow").to(host.device), load(host.folder, config, "hift").to(host.device)
    guidance, allowed = config.flow.inference_cfg_rate, config.allowed_steps(stream.steps)
    solvers = {steps: EulerSolver(flow.estimator, steps, guidance) for steps in allowed}
    return Stages(
        cached_flow(host, config, stream, flow, solvers, graphs),
        vocoder_stage(host, config, stream, hift, graphs),
        summary(host, graphs),
    )


def load(folder: Path, config: CosyVoice2Config, stem: Stem) -> Any:
    """Loads flow or vocoder in float32 on the CPU, see `token2wav.families`."""
    with Blank():
        module = cosyvoice2_flow(config.flow) if stem == "flow" else HiFT(config.hift)
    return ready(filled(module, config.weights_file(folder, stem)))


def check(folder: Path, config: CosyVoice2Config) -> None:
    """Reads the weights of a folder without building anything on a device.

    Raises:
        CheckpointError: the folder cannot be served, and why.
    """
    with Blank():
        flow, hift = cosyvoice2_flow(config.flow), HiFT(config.hift)
    checked(flow, config.weights_file(folder, "flow"))
    checked(hift, config.weights_file(folder, "hift"))


def ready(module: _Module) -> _Module:
    """Makes a network with its weights ready for inference."""
    if isinstance(module, HiFT):
        module.freeze()
    return module.eval().requires_grad_(False)


def chosen(host: Host, stream: StreamConfig) -> Graphs:
    """Chooses the backend of a family that has no `stream.reference`."""
    if stream.reference:
        raise ConfigError("stream.reference: the public loop of this family is not repeated; leave it out")
    return choose(host, stream)


def summary(host: Host, graphs: Graphs) -> StageSummary:
    """Says what the stages of such a family run on."""
    found = StageSummary(graphs.backend, host.precision, str(host.device))
    log.info("backend %s, %s, on %s, without kernels and graphs of the flow", found.name, found.precision, found.device)
    return found


def networks(config: CosyVoice2Config, storage: Storage) -> Networks:
    """Makes flow and vocoder without weights, see `token2wav.families`."""
    flow, guidance = cosyvoice2_flow(config.flow), config.flow.inference_cfg_rate
    layout = CacheLayout.of(config, flow.estimator, guidance, config.ode_steps, storage)
    return Networks(flow, HiFT(config.hift), layout, guidance, token_bytes=flow.encoder.token_bytes)


def cached_flow(
    host: Host,
    config: ModelConfig,
    stream: StreamConfig,
    flow: Flow[Any],
    solvers: Mapping[int, EulerSolver],
    graphs: Graphs,
) -> CachedFlow:
    """Makes the incremental flow stage, on torch or on an exported graph.

    Args:
        host: with the device on which the flow is.
        config: of the model.
        stream: how streams are cut into chunks.
        flow: with its weights. Those that its solvers have made tables of are dropped.
        solvers: of its estimator, by numbers of ODE steps, the usual one first.
        graphs: what executes the estimator.
    """
    keep_arithmetic_exact(host.device)
    flow.estimator.drop_time_weights()
    if host.precision == "float16":
        flow.estimator.halve()
    noise = FlowNoise(config.mel_bands)
    return incremental(host, config, stream, flow, noise, solvers, graphs, StepFactory)


def vocoder_stage(
    host: Host, config: ModelConfig, stream: StreamConfig, hift: HiFT, graphs: Graphs
) -> StreamingVocoder:
    """Makes the stage of a HiFT with its weights, on the device of a host."""
    pool = GraphPool(host.device) if graphs_enabled(host.device) else None
    return streaming_vocoder(hift, NormalNoise(hift.config.nb_harmonics + 1), config, stream, graphs, pool)
