"""Networks of CosyVoice2: a flow with a conformer and a U-Net, and HiFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.execution.step import StepMaker
from token2wav.families.cosyvoice2.flow import cosyvoice2_flow
from token2wav.families.family import Family
from token2wav.networks.flow_weights import read_cosyvoice_weights
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, NormalNoise, SourceNoise


class CosyVoice2(Family):
    def network(self, config: Any, stage: StageName) -> nn.Module:
        return cosyvoice2_flow(config.flow) if stage == "flow" else HiFT(config.vocoder)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        return read_cosyvoice_weights(network, path)

    def noise(self, config: Any, folder: Path, stage: StageName) -> FlowNoise | SourceNoise:
        return (
            FlowNoise(config.mel_bands)
            if stage == "flow"
            else NormalNoise(config.vocoder.nb_harmonics + 1)
        )

    def kernel_step(self) -> StepMaker | None:
        # Triton-language kernels
        from token2wav.families.cosyvoice2.kernel_step import CosyVoice2KernelStep

        return CosyVoice2KernelStep


FAMILY = CosyVoice2()
