"""StreamFlow as stages: windows of attention that is bounded on both sides."""

from __future__ import annotations

import logging

from token2wav.config import StreamConfig
from token2wav.errors import ConfigError
from token2wav.execution.backends import Graphs, Host
from token2wav.execution.runner import GraphPool, graphs_enabled
from token2wav.execution.stages import Stages, StageSummary
from token2wav.families.cosyvoice3.build import loaded_flow, networks, vocoder_stage
from token2wav.families.cosyvoice3.weights import check, load_flow_noise
from token2wav.families.streamflow.config import StreamFlowConfig
from token2wav.families.streamflow.flow import GuidedSolver, WindowFlow

__all__ = ["build", "check", "networks"]

log = logging.getLogger(__name__)


def build(host: Host, config: StreamFlowConfig, stream: StreamConfig) -> Stages:
    """Makes the stages of a model. Arguments and errors are those of CosyVoice3's."""
    if host.runtime.engine not in ("auto", "torch"):
        raise ConfigError(f"runtime.engine: {host.runtime.engine} does not run guided attention; take torch")
    flow, solvers = loaded_flow(host, config, stream)
    pool = GraphPool(host.device) if graphs_enabled(host.device) else None
    windows = {steps: GuidedSolver(flow.estimator, solver.tables) for steps, solver in solvers.items()}
    stage = WindowFlow(config, flow, load_flow_noise(host.folder, config), windows)
    summary = StageSummary("torch", host.precision, str(host.device))
    log.info("backend %s, %s, on %s", summary.name, summary.precision, summary.device)
    return Stages(stage, vocoder_stage(host, config, stream, Graphs("torch"), pool), summary)
