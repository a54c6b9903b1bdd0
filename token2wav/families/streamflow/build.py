"""StreamFlow as stages: windows of attention that is bounded on both sides."""

from __future__ import annotations

from token2wav.config import StreamConfig
from token2wav.errors import ConfigError
from token2wav.execution.backends import Graphs, Host
from token2wav.execution.stages import FlowStage
from token2wav.families.cosyvoice3.build import CosyVoice3Builder
from token2wav.families.streamflow.flow import GuidedSolver, WindowFlow


class StreamFlowBuilder(CosyVoice3Builder):
    """Builder of a StreamFlow model, with the vocoders of CosyVoice3."""

    @classmethod
    def choose(cls, host: Host, stream: StreamConfig) -> Graphs:
        if (engine := host.runtime.engine) not in ("auto", "torch"):
            raise ConfigError(f"runtime.engine: {engine} does not run guided attention; take torch")
        return Graphs("torch")

    def flow_stage(self) -> FlowStage:
        windows = {steps: GuidedSolver(self.flow.estimator, each.tables) for steps, each in self.solvers.items()}
        return WindowFlow(self.config, self.flow, self.flow_noise, windows)


build, check = StreamFlowBuilder.build, StreamFlowBuilder.check
choose, networks = StreamFlowBuilder.choose, StreamFlowBuilder.networks
