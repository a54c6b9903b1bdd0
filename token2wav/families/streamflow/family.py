"""Networks of StreamFlow: CosyVoice3's DiT under guided attention, and CosyVoice3's vocoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from token2wav.config.model_config import StageName
from token2wav.execution.cuda_graphs import GraphPool
from token2wav.families.cosyvoice3.family import CosyVoice3
from token2wav.families.streamflow.flow import WindowFlow
from token2wav.families.streamflow.solver import GuidedSolver
from token2wav.networks.ode import EulerSolver
from token2wav.stages.stage import Stage


class StreamFlow(CosyVoice3):
    """Family of StreamFlow. Its flow stage computes windows and stores nothing of their past."""

    torch_only = "guided attention (one mask for each layer, no cached past)"
    paged_flow = False

    def own_stage(
        self,
        config: Any,
        stage: StageName,
        network: Any,
        noise: Any,
        solvers: Mapping[int, EulerSolver],
        *,
        longest_hop: int,
        graphs: GraphPool | None,
    ) -> Stage | None:
        if stage != "flow":
            return None
        with torch.inference_mode():
            unconditional = network.unconditional()
        windows = {
            steps: GuidedSolver(network.estimator, solver.tables, unconditional)
            for steps, solver in solvers.items()
        }
        past = config.flow.past_tokens
        return WindowFlow(
            config, network, noise, windows, past, graphs=graphs, longest_hop=longest_hop
        )


FAMILY = StreamFlow()
