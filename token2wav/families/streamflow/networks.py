"""Networks of StreamFlow: CosyVoice3's DiT under guided attention, and CosyVoice3's vocoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token2wav.execution.stages import Stage
from token2wav.families.cosyvoice3.networks import CosyVoice3
from token2wav.families.streamflow.flow import GuidedSolver, WindowFlow
from token2wav.model_config import StageName
from token2wav.networks.ode import EulerSolver


class StreamFlow(CosyVoice3):
    """Family of StreamFlow. Its flow stage computes windows and stores nothing of their past."""

    torch_only = "guided attention"

    def own_stage(
        self,
        config: Any,
        stage: StageName,
        network: Any,
        noise: Any,
        solvers: Mapping[int, EulerSolver],
    ) -> Stage | None:
        if stage != "flow":
            return None
        windows = {
            steps: GuidedSolver(network.estimator, solver.tables)
            for steps, solver in solvers.items()
        }
        return WindowFlow(config, network, noise, windows, config.flow.past_tokens)


FAMILY = StreamFlow()
