"""Chatterbox as stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.execution.stages import FlowStage
from token2wav.families.chatterbox.config import ChatterboxConfig
from token2wav.families.chatterbox.source import SampleSource
from token2wav.families.cosyvoice2.build import Builder
from token2wav.families.cosyvoice2.flow import cosyvoice2_flow
from token2wav.families.cosyvoice2.weights import read_weights
from token2wav.model_config import Stem
from token2wav.networks.configs import HiFTConfig
from token2wav.networks.hift import Decode, HiFT
from token2wav.networks.source import Phase
from token2wav.networks.streaming import WHOLE, Piece


class ChatterboxBuilder(Builder):
    """Builder of a Chatterbox model. Of S3Gen's weights two parts are read; the rest makes voices of recordings."""

    @classmethod
    def network(cls, config: ChatterboxConfig, stem: Stem) -> Any:
        return cosyvoice2_flow(config.flow, mean_flow=config.mean_flow) if stem == "flow" else FadedHiFT(config.vocoder)

    @classmethod
    def weights(cls, network: Any, path: Path, stem: Stem) -> dict[str, torch.Tensor]:
        part = "flow" if stem == "flow" else "mel2wav"
        weights = read_weights(nn.ModuleDict({part: network}), path, f"{part}.")
        return {name.removeprefix(f"{part}."): weight for name, weight in weights.items()}

    def flow_stage(self) -> FlowStage:
        return self.recompute(windows=True) if self.stream.reference else super().flow_stage()


class FadedHiFT(HiFT):
    """HiFT whose utterances start with 20 ms of silence and 20 ms of fading in, against what is left of the prompt."""

    fade: torch.Tensor

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__(config, SampleSource)
        quiet = config.sampling_rate // 50
        rising = (1 - torch.linspace(0, torch.pi, quiet).cos()) / 2
        self.register_buffer("fade", torch.cat((torch.zeros(quiet), rising)), persistent=False)

    def forward(
        self,
        mel: torch.Tensor,
        noise: torch.Tensor,
        piece: Piece = WHOLE,
        phase: Phase = "exact",
        decode: Decode | None = None,
    ) -> torch.Tensor:
        audio = super().forward(mel, noise, piece, phase, decode)
        if piece.state is None or piece.first:
            start = self.delay if piece.first else 0
            faded = audio[:, start : start + len(self.fade)]
            faded *= self.fade[: faded.shape[1]]
        return audio


build, load = ChatterboxBuilder.build, ChatterboxBuilder.load
check, choose, networks = ChatterboxBuilder.check, ChatterboxBuilder.choose, ChatterboxBuilder.networks
