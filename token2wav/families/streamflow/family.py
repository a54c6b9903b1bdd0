"""Networks of StreamFlow: CosyVoice3's DiT under guided attention, and CosyVoice3's vocoders."""

from __future__ import annotations

from typing import Any

import torch

from token2wav.families.cosyvoice3.family import CosyVoice3
from token2wav.families.family import StageParts
from token2wav.families.streamflow.flow import WindowFlow
from token2wav.families.streamflow.solver import GuidedSolver
from token2wav.stages.stage import Stage


class StreamFlow(CosyVoice3):
    """Family of StreamFlow. Its flow stage computes windows and stores nothing of their past."""

    torch_only = "guided attention (one mask for each layer, no cached past)"
    paged_flow = False

    def own_stage(self, parts: StageParts) -> Stage[Any] | None:
        if parts.name != "flow":
            return None
        with torch.inference_mode():
            unconditional = parts.network.unconditional()
        estimator, velocity = parts.network.estimator, None
        if parts.kernels:
            # Triton-language kernels
            from token2wav.families.streamflow.kernel_velocity import KernelVelocity

            velocity = KernelVelocity(estimator)
        windows = {
            steps: GuidedSolver(estimator, solver.tables, unconditional, velocity)
            for steps, solver in parts.solvers.items()
        }
        return WindowFlow(
            parts.config,
            parts.network,
            parts.noise,
            windows,
            parts.config.flow.past_tokens,
            graphs=parts.graphs,
            longest_hop=parts.longest_hop,
        )


FAMILY = StreamFlow()
