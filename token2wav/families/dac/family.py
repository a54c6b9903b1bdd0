"""Family of DAC: its decoder, with modules named as the published weights in the format of
`transformers`, and its weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.dac.config import DacSizes
from token2wav.families.family import Family
from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.streaming import OFFLINE, StreamStep, WaveformNetwork
from token2wav.networks.codec_weights import BOOK, converted, transformers_name
from token2wav.networks.symmetric_decoder import SymmetricDecoder
from token2wav.networks.weights import fitting_weights, floating_tensors, read_state

_PARTS = ("quantizer.", "decoder.")  # the rest makes codes
_ENCODING = re.compile(r"quantizer\.quantizers\.\d+\.in_proj\.\w+")  # only makes codes


class Dac(WaveformNetwork):
    """Decoder of DAC, from codes to audio."""

    input_dtype = torch.int32

    def __init__(self, sizes: DacSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.n_codebooks, sizes.frame_samples
        self.quantizer = ProjectedCodebooks(
            sizes.n_codebooks, sizes.codebook_size, sizes.codebook_dim, sizes.latents
        )
        self.decoder = SymmetricDecoder(sizes)
        self.output = self.decoder.place()

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio of codes (B, codebooks, T), which are -1 in codebooks that a stream
        does not send.

        Returns:
            (B, 1, frame_samples * T) audio of a step, late by `output_delay`. A whole sequence is
            shorter by `missing_samples` samples.
        """
        return torch.tanh(self.decoder(self.quantizer(codes), step))


class DacFamily(Family):
    """Family of DAC."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return Dac(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        state = {
            name: value
            # `descript-audio-codec` wraps the weights
            for name, value in read_state(path, _PARTS, wrappers=("state_dict",)).items()
            if not _ENCODING.match(name)
        }
        blocks = len(network.decoder.block)
        named = floating_tensors(state, path, lambda name: transformers_name(name, blocks))
        return fitting_weights(network, converted(named, BOOK, path), path)


FAMILY = DacFamily()
