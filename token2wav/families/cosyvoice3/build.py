"""CosyVoice3 as stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from token2wav.cache.paged_kv_cache import PagedKVCache
from token2wav.execution.recompute import RecomputeVocoder
from token2wav.execution.stages import FlowStage, VocoderStage
from token2wav.execution.step import StepFunction
from token2wav.families.bigvgan.config import BigVGANConfig
from token2wav.families.bigvgan.network import BigVGAN
from token2wav.families.bigvgan.weights import read_weights
from token2wav.families.cosyvoice2.build import Builder
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.families.cosyvoice3.noise import load_flow_noise, load_source_noise
from token2wav.model_config import Stem
from token2wav.networks.hift import HiFT
from token2wav.networks.noise import FlowNoise, SourceNoise
from token2wav.networks.ode import OdeTables


class CosyVoice3Builder(Builder):
    """Builder of a CosyVoice3 model, with HiFT or BigVGAN."""

    @staticmethod
    def kernels(estimator: Any, tables: OdeTables, cache: PagedKVCache) -> StepFunction:
        from token2wav.families.cosyvoice3.kernel_step import KernelStep  # Triton-language kernels

        return KernelStep(estimator, tables, cache)

    @classmethod
    def network(cls, config: CosyVoice3Config, stem: Stem) -> Any:
        if stem == "flow":
            return Flow(config.flow)
        return BigVGAN(config.vocoder) if isinstance(config.vocoder, BigVGANConfig) else HiFT(config.vocoder)

    @classmethod
    def weights(cls, network: Any, path: Path, stem: Stem) -> dict[str, torch.Tensor]:
        return read_weights(network, path) if isinstance(network, BigVGAN) else super().weights(network, path, stem)

    @classmethod
    def noises(cls, folder: Path, config: CosyVoice3Config) -> tuple[FlowNoise, SourceNoise | None]:
        bigvgan = isinstance(config.vocoder, BigVGANConfig)
        return load_flow_noise(folder, config), None if bigvgan else load_source_noise(folder, config)

    def flow_stage(self) -> FlowStage:
        return self.recompute(full_tail=True) if self.stream.reference else super().flow_stage()

    def vocoder_stage(self) -> VocoderStage:
        if self.stream.reference:
            return RecomputeVocoder(self.vocoder, self.source_noise, "reference")
        return super().vocoder_stage()


build, load = CosyVoice3Builder.build, CosyVoice3Builder.load
check, choose, networks = CosyVoice3Builder.check, CosyVoice3Builder.choose, CosyVoice3Builder.networks
