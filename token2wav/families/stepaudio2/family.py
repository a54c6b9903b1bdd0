"""Networks of Step-Audio2: a flow with a conformer and a DiT, and HiFT."""

from __future__ import annotations

from typing import Any

from torch import nn

from token2wav.config.model_config import StageName
from token2wav.execution.step import StepMaker
from token2wav.families.cosyvoice2.family import CosyVoice2
from token2wav.families.stepaudio2.flow import stepaudio2_flow


class StepAudio2(CosyVoice2):
    """Family of Step-Audio2 mini and MiniCPM-o 4.5."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return stepaudio2_flow(config.flow) if stage == "flow" else super().network(config, stage)

    def kernel_step(self) -> StepMaker | None:
        # Triton-language kernels
        from token2wav.families.stepaudio2.kernel_step import StepAudio2KernelStep

        return StepAudio2KernelStep


FAMILY = StepAudio2()
