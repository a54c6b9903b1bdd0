"""Family of CosyVoice1: its networks, their weights, and its stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import ENDINGS, StageName
from token2wav.families.cosyvoice1.network import CosyVoice1
from token2wav.families.cosyvoice1.stage import CosyVoice1Decoder
from token2wav.families.family import Family, StageParts
from token2wav.networks.flow_weights import read_cosyvoice_weights
from token2wav.published.checkpoint_files import weights_file
from token2wav.stages.stage import Stage


class CosyVoice1Family(Family):
    """Family of CosyVoice1. The weights of its only stage are in two files."""

    torch_only = "windows (a flow that is not causal)"

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return CosyVoice1(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        vocoder = weights_file(path.parent, tuple(f"hift{ending}" for ending in ENDINGS))
        files = {"flow": path, "hift": vocoder}
        return {
            f"{part}.{name}": weight
            for part, file in files.items()
            for name, weight in read_cosyvoice_weights(getattr(network, part), file).items()
        }

    def own_stage(self, parts: StageParts) -> Stage[Any] | None:
        return CosyVoice1Decoder(parts.config, parts.network)


FAMILY = CosyVoice1Family()
