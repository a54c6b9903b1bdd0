"""Step-Audio2 as stages: its weights are loaded and put on a device, and its networks get what runs them there."""

from __future__ import annotations

from pathlib import Path

from token2wav.cache.paged_kv_cache import Storage
from token2wav.config import StreamConfig
from token2wav.execution.backends import Host
from token2wav.execution.stages import Networks, Stages
from token2wav.families.cosyvoice2.build import cache_layout, cached_flow, check_settings, summary, vocoder_stage
from token2wav.families.cosyvoice3.weights import checked, filled
from token2wav.families.stepaudio2.config import StepAudio2Config
from token2wav.families.stepaudio2.flow import stepaudio2_flow
from token2wav.networks.hift import HiFT
from token2wav.networks.ode import EulerSolver
from token2wav.networks.weights import Blank


def build(host: Host, config: StepAudio2Config, stream: StreamConfig) -> Stages:
    """Makes the stages of a model.

    Raises:
        ConfigError: the settings ask for what there is for other families only.
        CheckpointError: weights are missing, unreadable, or do not fit the configuration.
    """
    check_settings(host, stream)
    with Blank():
        flow, hift = stepaudio2_flow(config.flow), HiFT(config.hift)
    filled(flow, config.weights_file(host.folder, "flow")).eval().requires_grad_(False)
    filled(hift, config.weights_file(host.folder, "hift")).freeze()
    guidance, sizes, flow = config.flow.inference_cfg_rate, config.flow.estimator, flow.to(host.device)
    solvers = {steps: EulerSolver(flow.estimator, steps, guidance) for steps in config.allowed_steps(stream.steps)}
    return Stages(
        cached_flow(host, config, stream, flow, solvers, (sizes.depth, sizes.num_heads, sizes.head_dim)),
        vocoder_stage(host, config, stream, hift.to(host.device)),
        summary(host),
    )


def networks(config: StepAudio2Config, storage: Storage) -> Networks:
    """Makes flow and vocoder without weights, see `token2wav.families`."""
    flow, sizes, guidance = stepaudio2_flow(config.flow), config.flow.estimator, config.flow.inference_cfg_rate
    attention = sizes.depth, sizes.num_heads, sizes.head_dim
    layout = cache_layout(config, flow, attention, guidance, config.ode_steps, storage)
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
