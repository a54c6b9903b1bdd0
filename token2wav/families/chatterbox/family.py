"""Networks of Chatterbox: the flow of S3Gen, plain or MeanFlow, and HiFT with a fade-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.chatterbox.fade import FadedHiFT
from token2wav.families.cosyvoice2.family import CosyVoice2
from token2wav.families.cosyvoice2.flow import cosyvoice2_flow
from token2wav.families.family import ReferenceLoop
from token2wav.networks.flow_weights import read_cosyvoice_weights


class Chatterbox(CosyVoice2):
    """Family of Chatterbox and Chatterbox Turbo.

    Of the weights of S3Gen only the flow and the vocoder are read. The rest makes voices.
    """

    reference = ReferenceLoop(windows=True)

    def network(self, config: Any, stage: StageName) -> nn.Module:
        if stage == "flow":
            return cosyvoice2_flow(config.flow, mean_flow=config.mean_flow)
        return FadedHiFT(config.vocoder)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        part = "flow" if stage == "flow" else "mel2wav"
        weights = read_cosyvoice_weights(nn.ModuleDict({part: network}), path, f"{part}.")
        return {name.removeprefix(f"{part}."): weight for name, weight in weights.items()}


FAMILY = Chatterbox()
