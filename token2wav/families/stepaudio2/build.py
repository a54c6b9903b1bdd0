"""Step-Audio2 as stages: its weights are loaded and put on a device, and its networks get what runs them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from token2wav.cache.paged_kv_cache import CacheLayout, Storage
from token2wav.config import StreamConfig
from token2wav.execution.backends import Host
from token2wav.execution.stages import Networks, Stages
from token2wav.families.cosyvoice2.build import cached_flow, chosen, ready, summary, vocoder_stage
from token2wav.families.cosyvoice3.weights import checked, filled
from token2wav.families.stepaudio2.config import StepAudio2Config
from token2wav.families.stepaudio2.flow import stepaudio2_flow
from token2wav.model_config import Stem
from token2wav.networks.hift import HiFT
from token2wav.networks.ode import EulerSolver
from token2wav.networks.weights import Blank


def build(host: Host, config: StepAudio2Config, stream: StreamConfig) -> Stages:
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


def load(folder: Path, config: StepAudio2Config, stem: Stem) -> Any:
    """Loads flow or vocoder in float32 on the CPU, see `token2wav.families`."""
    with Blank():
        module = stepaudio2_flow(config.flow) if stem == "flow" else HiFT(config.hift)
    return ready(filled(module, config.weights_file(folder, stem)))


def networks(config: StepAudio2Config, storage: Storage) -> Networks:
    """Makes flow and vocoder without weights, see `token2wav.families`."""
    flow, guidance = stepaudio2_flow(config.flow), config.flow.inference_cfg_rate
    layout = CacheLayout.of(config, flow.estimator, guidance, config.ode_steps, storage)
    return Networks(flow, HiFT(config.hift), layout, guidance, token_bytes=flow.encoder.token_bytes)


def check(folder: Path, config: StepAudio2Config) -> None:
    """Reads the weights of a folder without building anything on a device.

    Raises:
        CheckpointError: the folder cannot be served, and why.
    """
    with Blank():
        flow, hift = stepaudio2_flow(config.flow), HiFT(config.hift)
    checked(flow, config.weights_file(folder, "flow"))
    checked(hift, config.weights_file(folder, "hift"))
