"""Family of the Higgs Audio tokenizer v2: its decoder, and its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.execution.family import Family
from token2wav.families.dac.network import Decoder
from token2wav.families.dac.published import converted
from token2wav.families.higgs.config import HiggsConfig
from token2wav.model_config import StageName
from token2wav.networks.codebooks import ProjectedCodebooks
from token2wav.networks.streaming import OFFLINE, StreamStep, VocoderNetwork
from token2wav.networks.weights import (
    fitting_weights,
    floating_tensors,
    read_tensors,
)

_QUANTIZER, _PROJECTION, _DECODER = "quantizer.quantizers.", "fc2.", "acoustic_decoder."
_CODEBOOK = re.compile(r"quantizer\.quantizers\.(\d{1,3})\.(codebook\.embed|project_out\.\w+)")
_BOOK = ("codebook.embed", "project_out.weight", "project_out.bias")


class Higgs(VocoderNetwork):
    """Decoder of the Higgs Audio tokenizer, from codes to audio. Modules have the names of the
    published weights.

    Args:
        config: configuration of the model.
    """

    def __init__(self, config: HiggsConfig) -> None:
        super().__init__()
        sizes, width = config.sizes, config.quantizer_width
        self.bands, self.frame_samples = config.mel_bands, config.samples_per_token
        self.quantizer = ProjectedCodebooks(
            self.bands, sizes.codebook_size, sizes.codebook_dim, width
        )
        self.fc2 = nn.Linear(width, config.decoder.latents)
        self.acoustic_decoder = Decoder(config.decoder, whole_frames=True)
        self.output_delay = self.acoustic_decoder.output_delay

    def freeze(self) -> None:
        super().freeze()
        self.acoustic_decoder.freeze()

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of codes (B, codebooks, T), which are whole
        numbers in float32, and -1 in codebooks that a stream does not send. The audio of a step is
        late by `output_delay`.
        """
        latents = self.fc2(self.quantizer(codes).transpose(1, 2)).transpose(1, 2)
        return self.acoustic_decoder(latents, step)


class HiggsFamily(Family):
    """Family of the Higgs Audio tokenizer v2."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Higgs(config)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        # The other weights, most of the file, make codes. They stay in the file.
        own = {
            name: value
            for part in (_QUANTIZER, _PROJECTION, _DECODER)
            for name, value in read_tensors(path, part).items()
            if part != _QUANTIZER or _CODEBOOK.fullmatch(name)
        }
        named = floating_tensors(own, path, str)
        return fitting_weights(network, converted(named, _BOOK, path), path)


FAMILY = HiggsFamily()
