"""Networks of CosyVoice3: a flow with a DiT, and HiFT or BigVGAN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.execution.step import StepMaker
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.cosyvoice3.noise import load_flow_noise, load_source_noise
from token2wav.families.family import Family, ReferenceLoop
from token2wav.networks.bigvgan import BigVGAN
from token2wav.networks.flow_weights import read_bigvgan_weights, read_cosyvoice_weights
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, SourceNoise
from token2wav.published.sizes import BigVGANConfig


class CosyVoice3(Family):
    """Family of CosyVoice3, and of other models in its format."""

    reference = ReferenceLoop(full_tail=True, recomputes_audio=True)

    def network(self, config: Any, stage: StageName) -> nn.Module:
        if stage == "flow":
            return Flow(config.flow)
        return (
            BigVGAN(config.vocoder)
            if isinstance(config.vocoder, BigVGANConfig)
            else HiFT(config.vocoder)
        )

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        if isinstance(network, BigVGAN):
            return read_bigvgan_weights(network, path)
        return read_cosyvoice_weights(network, path)

    def noise(self, config: Any, folder: Path, stage: StageName) -> FlowNoise | SourceNoise | None:
        if stage == "flow":
            return load_flow_noise(folder, config)
        return (
            None if isinstance(config.vocoder, BigVGANConfig) else load_source_noise(folder, config)
        )

    def kernel_step(self) -> StepMaker | None:
        # Triton-language kernels
        from token2wav.families.cosyvoice3.kernel_step import CosyVoice3KernelStep

        return CosyVoice3KernelStep


FAMILY = CosyVoice3()
